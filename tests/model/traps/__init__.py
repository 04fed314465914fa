"""Ways to misread the model, planted on purpose; tests/model/test_traps.py runs them."""
