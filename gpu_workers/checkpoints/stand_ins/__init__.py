"""Models that stand for those whose code is not in transformers: this code goes into their checkpoints.

The files are copied as they are and run from the checkpoint, so they import nothing of encoderd, and of each
other only by relative imports. Names of classes, methods and weights are the real models'.
"""
