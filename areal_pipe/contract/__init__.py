"""What a user implements and receives: workflow, engine, interaction, trajectory, errors.

The lowest room: it imports no other.
"""
