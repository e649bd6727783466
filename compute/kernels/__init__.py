"""Reading and writing the history of a session on a device.

``state`` holds the device data of a session, ``reference`` the definition of what is right in plain torch. Every other
kernel does what the function of the same name there does, faster.
"""
