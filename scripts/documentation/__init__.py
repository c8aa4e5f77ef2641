"""Generators of the documentation: reference pages, pictures and tables of figures."""
