"""The limits of steps, decided from the time that steps take."""
