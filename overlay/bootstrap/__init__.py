"""What runs in every interpreter of a launched server. This folder itself is what PYTHONPATH gains."""
