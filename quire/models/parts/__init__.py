"""The parts that families are composed of."""
