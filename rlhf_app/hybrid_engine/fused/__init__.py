"""A second way to run the forwards of a rollout: the model's parameters, fewer and larger kernels.

A module's own forward makes many small kernels per layer. `plan` reads what a known decoder
computes and where its parameters are, `decoder` computes the same over them. Nothing is copied:
a plan holds modules, and every forward reads their weights anew.
"""
