"""Turns plans into work of the device."""
