"""kvd where users already are: other libraries' and engines' models with their history or prefixes in kvd."""
