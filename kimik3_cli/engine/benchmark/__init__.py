"""How fast a model runs here, beside what this machine could do at best."""
