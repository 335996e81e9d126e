"""Commands that change the models of a running server: launch, list, terminate, register, and the rest."""
