"""The KV cache on disk: conversations, reusable prefixes, and llama.cpp's slots.

May import: base, plan, backends, engine, loading.
Begin with: prompt_cache.py (the format), then chat_files.py, prefix_files.py, slot_files.py, saved_media.py and
attachments.py.
"""
