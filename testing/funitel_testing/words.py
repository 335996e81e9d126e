"""A tokenizer of a few words, as BERT's; needs no torch."""

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("the", "sea", "is", "deep", "and", "blue", "##er", "birds", "fly", "over", "it", "slowly", "capital", "of")
VOCAB_SIZE = 64


def word_tokenizer() -> Tokenizer:
    """WordPiece over a few words, with BERT's template for texts and pairs."""
    names = [*SPECIAL, *WORDS]
    vocabulary = {name: i for i, name in enumerate(names + [f"[unused{i}]" for i in range(VOCAB_SIZE - len(names))])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return tokenizer
