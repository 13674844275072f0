"""Every message between Holdfast's processes: what they say, how it is framed, and how both ends prove who they are.

``messages`` holds the frozen values, ``frames`` the bytes, ``channel`` the asyncio end of a stream, ``handshake``
the proof. Nothing here decides anything.
"""
