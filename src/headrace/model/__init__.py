"""What a model is made of: storages, names, groups, tensors."""
