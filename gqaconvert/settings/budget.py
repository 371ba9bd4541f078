"""How long a recipe trains, in steps and tokens, whichever way its budget is written."""

from __future__ import annotations

from gqaconvert.settings.recipe import Recipe


def total_steps(recipe: Recipe) -> int:
    """Updates that the budget asks for, rounded up; 0 if nothing is trained."""
    training = recipe.uptrain
    if training is None:
        return 0
    budget = training.budget
    if budget.steps is not None:
        return budget.steps
    tokens = budget.tokens
    if tokens is None:
        tokens = (budget.alpha or 0.0) * (recipe.source.pretraining_tokens or 0.0)
    # Whole tokens first, so that the last digit of a product never adds a step.
    return max(1, -(-round(tokens) // training.batch_tokens))


def total_tokens(recipe: Recipe) -> int:
    """Tokens that these steps read: what was asked for, up to the end of the last step."""
    return total_steps(recipe) * (recipe.uptrain.batch_tokens if recipe.uptrain else 0)
