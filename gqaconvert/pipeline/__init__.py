"""One experiment from a recipe: source to report, stage by stage, restartable."""
