"""Small checkpoints with random weights: make.py writes them, recipe.py says what a recipe is, the other
files hold the recipes of one group of families each.

`encoderd make-checkpoint` runs this package as `python -m gpu_workers.checkpoints FAMILY DIRECTORY`.
"""

from gpu_workers.checkpoints.make import RECIPES, make_checkpoint

__all__ = ["RECIPES", "make_checkpoint"]
