"""Where offloaded bytes rest: one file per store, all behind :class:`penstock.stores.store.Store`."""
