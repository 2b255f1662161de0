"""Libraries and engines that headrace works with, one folder each; each is imported only when it is used."""
