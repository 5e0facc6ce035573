"""A sample is cut by policy; its placeholders are always exactly as many as its pictures give features."""

import dataclasses

import numpy as np
import pytest

from mmjax.config import DataConfig, VisionConfig
from mmjax.data.align import Document, align, fit
from mmjax.data.sources.conversation import Message, Sample
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.errors import DataError

VISION = VisionConfig(patch_pixels=4)
TOKENIZER = ByteTokenizer()


def picture(rows: int, columns: int) -> np.ndarray:
    return np.zeros((4 * rows, 4 * columns, 3), np.uint8)


def sample(*turns: tuple) -> Sample:
    roles = ("user", "assistant")
    messages = [
        Message(role=roles[number % 2], parts=parts, is_supervised=number % 2 == 1)
        for number, parts in enumerate(turns)
    ]
    return Sample(where="here", messages=tuple(messages))


# Positions: header, 2 letters, 4 features, 1 letter, 6 features (two pictures side by side: 2 and 4), end; answer.
MIXED = sample(("ab", picture(4, 4), "c", picture(2, 4), picture(4, 4)), ("xy",), ("d", picture(2, 2)), ("zw",))


def document(which: Sample = MIXED) -> Document:
    return align(which, TOKENIZER, DataConfig(row_tokens=10**6, row_patches=10**6), VISION)


def check_whole(part: Document) -> None:
    spans = part.picture_spans()
    assert len(spans) == len(part.pictures)
    for span, placed in zip(spans, part.pictures, strict=True):
        assert span.stop - span.start == placed.num_features == placed.num_patches // 4
        assert np.all(part.tokens[span] == TOKENIZER.image_token_id) and np.all(part.is_feature[span])
    assert part.is_feature.sum() == sum(span.stop - span.start for span in spans)
    assert not np.any(part.is_supervised & part.is_feature)
    assert len(part.tokens) == len(part.is_supervised) == len(part.is_feature)


def test_placeholders_are_as_many_as_features_also_of_pictures_side_by_side():
    check_whole(document())
    assert [placed.num_features for placed in document().pictures] == [4, 2, 4, 1]
    assert document().sizes[:3] == (1 + 2 + 4 + 1 + 6 + 1 + 4 + 4 + 4, 44, 6)
    assert document().sizes.squared_patches == 16**2 + 8**2 + 16**2 + 4**2


@pytest.mark.parametrize("policy", ["error", "drop", "drop_image", "truncate"])
def test_cut_at_every_length_no_picture_is_ever_cut_in_half(policy):
    whole = document()
    for row_tokens in range(1, len(whole.tokens) + 2):
        for row_patches in (0, 12, 16, 24, 40, 44):
            data = DataConfig(row_tokens=row_tokens, row_patches=row_patches, too_long=policy)
            fits = row_tokens >= len(whole.tokens) and row_patches >= 44
            if policy == "error" and not fits:
                with pytest.raises(DataError, match="here: found a sample of 27 tokens and 44 patches"):
                    fit(whole, data)
                continue
            part, outcome = fit(whole, data)
            if fits:
                assert part is whole and outcome == "whole"
                continue
            assert (part is None) == (outcome == "dropped")
            if policy == "drop":
                assert part is None
            if part is None:
                continue
            check_whole(part)
            assert len(part.tokens) <= row_tokens and part.num_patches <= row_patches and part.sizes.supervised > 0
            text, whole_text = part.tokens[~part.is_feature], whole.tokens[~whole.is_feature]
            if policy == "truncate":
                assert outcome == "cut" and np.array_equal(part.tokens, whole.tokens[: len(part.tokens)])
                # Nothing was left out that would have fitted: only a picture that does not stands behind the end.
                is_at_picture = len(part.tokens) < len(whole.tokens) and whole.is_feature[len(part.tokens)]
                assert len(part.tokens) == row_tokens or is_at_picture
            else:
                assert outcome == "without pictures" and np.array_equal(text, whole_text)
                assert part.pictures == whole.pictures[: len(part.pictures)]


def test_pictures_left_out_are_no_more_than_needed_and_answers_stay_where_they_are():
    whole = document()
    data = DataConfig(row_tokens=26, row_patches=100, too_long="drop_image")
    part, _ = fit(whole, data)
    assert part is not None and len(part.pictures) == 3
    assert part.tokens[part.answer_start : part.answer_start + 2].tolist() == list(b"zw")
    part, _ = fit(whole, dataclasses.replace(data, row_patches=0))
    assert part is not None and not part.pictures and len(part.tokens) == 27 - 11
    assert fit(whole, dataclasses.replace(data, row_tokens=15)) == (None, "dropped")


def test_an_answer_of_which_the_cut_leaves_nothing_drops_the_sample():
    data = DataConfig(row_tokens=10**6, row_patches=24, too_long="truncate")
    part, outcome = fit(document(sample((picture(4, 4), picture(4, 4)), ("yes",))), data)
    assert (part, outcome) == (None, "dropped")


def test_a_sample_of_which_nothing_is_learned_is_an_error_with_its_name():
    silent = Sample(
        where="file, line 4",
        messages=(Message(role="assistant", parts=("x",), is_supervised=False),),
    )
    with pytest.raises(DataError, match="file, line 4: found no supervised token"):
        fit(document(silent), DataConfig())
