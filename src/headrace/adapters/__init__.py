"""Libraries and engines that headrace works with, one folder or file each; each is imported only when it is used."""
