"""Realistic inputs for the micro layer, one module a patch (see ``ab_runs.micro``)."""
