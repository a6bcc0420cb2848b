"""Supervised fine-tuning on demonstrated gold queries or chats."""
