"""Parts of a model: storages, names, groups, tensors."""
