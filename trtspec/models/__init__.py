"""The models as torch modules, loaded from checkpoint folders."""
