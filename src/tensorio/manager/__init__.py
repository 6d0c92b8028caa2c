"""The life of a training checkpoint: steps that appear whole, age, are found again and checked."""
