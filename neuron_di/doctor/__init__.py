"""`neuron-di doctor`: what is wrong with a machine, before it costs an hour.

    command ─► checks      what is looked at, and in which order
            ─► runner      each check in a process of its own, with a deadline
               machine     the files, programs, packages and variables that a check sees
               finding     what it says
            ─► report      for a person, or as JSON

Every other module is one check. Importing this loads none of them.

Next: neuron_di/doctor/checks.py
"""

from neuron_di.doctor.entry import add_doctor_flags, run_doctor_command

__all__ = ["add_doctor_flags", "run_doctor_command"]
