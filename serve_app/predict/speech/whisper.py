"""A Whisper model: windows of half a minute from many sounds in one batch, each sound one window after the other."""

from __future__ import annotations

import wave
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    WhisperFeatureExtractor,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from serve_app.media.activity import Pauses, Spoken, spans
from serve_app.media.decoder import Decoder, Sound
from serve_app.media.errors import BadFile
from serve_app.predict.loading import load_model
from serve_app.predict.predictor import BadInput, Item, Place, Predictor, Run, Units
from serve_app.predict.speech.encoder import Encoder
from serve_app.predict.speech.greedy import Greedy
from serve_app.predict.speech.segments import FRAME_S, split
from serve_app.predict.speech.spectrum import Spectrum
from serve_app.predict.speech.words import words


@dataclass(slots=True, frozen=True)
class HearingOptions:
    """What one request wants of its sound. ``language``: a code, None to find out. Silence is what is likelier than
    ``silence`` to hold no speech while its text is less likely than ``doubt``; None: everything is told.
    """

    task: str = "transcribe"
    language: str | None = None
    prompt: tuple[int, ...] = ()
    beams: int = 1
    words: bool = False
    silence: float | None = None
    doubt: float | None = None


@dataclass(slots=True, frozen=True)
class Heard:
    """One window. ``times``: seconds within it at which its tokens begin, where the model tells."""

    tokens: list[int]
    language: str
    language_probability: float
    no_speech: float | None
    logprob: float | None
    times: list[float] | None = None


@dataclass(slots=True)
class Transcript:
    """``tokens``: all that were said, segment by segment."""

    segments: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class Whisper(Predictor):
    def __init__(self, place: Place) -> None:
        self._model = load_model(AutoModelForSpeechSeq2Seq, place)
        self._tokenizer = AutoTokenizer.from_pretrained(place.path, local_files_only=True, trust_remote_code=False)
        self._extractor = WhisperFeatureExtractor.from_pretrained(place.path, local_files_only=True)
        self._decoder = Decoder()
        config = self._model.generation_config
        self._languages: dict[str, int] = getattr(config, "lang_to_id", None) or {}
        self.multilingual = bool(getattr(config, "is_multilingual", False)) and bool(self._languages)
        self._start: int = config.decoder_start_token_id
        self._eos: int = self._model.config.eos_token_id
        self._begin: int = config.no_timestamps_token_id + 1
        # Only some checkpoints say which heads look at the sound.
        self._aligned = getattr(config, "alignment_heads", None) is not None
        encoder = self._model.get_encoder()
        self._stride: int = encoder.conv1.stride[0] * encoder.conv2.stride[0]
        self._window: int = self._stride * self._model.config.max_source_positions
        self._no_speech = self._token("<|nospeech|>") or self._token("<|nocaptions|>")
        self._encoder = Encoder(self._model) if Encoder.takes(self._model) else None
        self._greedy = Greedy(self._model) if Greedy.takes(self._model) else None

    def _token(self, name: str) -> int | None:
        found = self._tokenizer.convert_tokens_to_ids(name)
        return None if found is None or found == self._tokenizer.unk_token_id else int(found)

    def prepare(self, data: bytes, options: dict[str, Any]) -> Item:
        asked = self._asked(options)
        try:
            sound = self._decoder.sound(data)
        except BadFile as refused:
            raise BadInput(f"audio: {refused}.") from None
        spoken = None
        if pauses := options.get("pauses"):
            spoken = Spoken(sound.samples, spans(sound.samples, Pauses(**pauses)))
        heard = sound.samples if spoken is None else spoken.samples
        spectrum = Spectrum(self._extractor, heard) if spoken is None or len(heard) else None
        return Item((sound, spectrum, spoken), asked=asked, units={"audio_ms": sound.milliseconds})

    def _asked(self, options: dict[str, Any]) -> HearingOptions:
        task, language, prompt = options.get("task", "transcribe"), options.get("language"), options.get("prompt")
        if not self.multilingual:
            if task != "transcribe" or language not in (None, "en", "english"):
                raise BadInput("This model transcribes English alone; leave task and language out.")
            language = None
        elif language is not None:
            language = TO_LANGUAGE_CODE.get(language.lower(), language.lower())
            if f"<|{language}|>" not in self._languages:
                known = ", ".join(sorted(code[2:-2] for code in self._languages))
                raise BadInput(f"language: this model does not know {language[:20]!r}; it knows {known}.")
        ids: tuple[int, ...] = ()
        if prompt:
            # Half of the decoder's positions are left for the answer.
            most = self._model.config.max_target_positions // 2 - 1
            try:
                found = self._tokenizer.get_prompt_ids(prompt, return_tensors="np").tolist()
            except ValueError:
                raise BadInput("prompt: it holds one of the model's control tokens; leave that out.") from None
            ids = tuple([found[0], *found[1:][-most + 1 :]])
        return HearingOptions(
            task, language, ids, options.get("beams", 1), bool(options.get("words")), options.get("silence"),
            options.get("doubt"),
        )  # fmt: skip

    async def answer(self, item: Item, run: Run) -> tuple[Any, Units]:
        sound, spectrum, spoken = item.value
        asked: HearingOptions = item.asked
        said, at = Transcript(), 0
        language, probability = asked.language or "", 1.0
        while spectrum is not None and at < spectrum.frames:
            frames = min(self._window, spectrum.frames - at)
            prompt = asked.prompt if at == 0 else ()
            kind = (asked.task, prompt, asked.beams, asked.words)
            window = Item((spectrum, at, language or None), self._window // self._stride, kind, asked)
            [heard] = await run([window])
            if not language:
                language, probability = heard.language, heard.language_probability
            at += self._add(said, heard, at, frames, asked) or frames
        if spectrum is None and not language:
            language, probability = "en", 0.0  # nobody speaks
        return self._told(said, sound, spoken, language, probability), item.units

    def _add(self, said: Transcript, heard: Heard, at: int, frames: int, asked: HearingOptions) -> int:
        """Adds the window's segments; how many of its frames are done."""
        if asked.silence is not None and heard.no_speech is not None and heard.no_speech > asked.silence:
            doubt = asked.doubt
            if doubt is None or heard.logprob is None or heard.logprob < doubt:
                return frames
        if not heard.tokens:
            return frames
        parts, done = split(heard.tokens, self._begin, frames, self._stride)
        for part in parts:
            tokens = heard.tokens[part.first : part.last]
            times = None if heard.times is None else heard.times[part.first : part.last]
            self._segment(said, tokens, times, (at * FRAME_S, part.start, part.end), heard, asked)
        return done

    def _segment(
        self, said: Transcript, tokens: list[int], times: list[float] | None, when: tuple[float, float, float],
        heard: Heard, asked: HearingOptions,
    ) -> None:  # fmt: skip
        """``when``: seconds of the window, and within it of the segment's start and end."""
        offset, start, end = when[0], when[0] + when[1], when[0] + when[2]
        said.tokens += tokens
        text = self._text(tokens)
        packed = text.encode()
        segment: dict[str, Any] = {
            "start": round(start, 3),
            "end": round(end, 3),
            "text": text,
            "tokens": tokens,
            "temperature": 0.0,
            "avg_logprob": heard.logprob,
            "compression_ratio": len(packed) / len(zlib.compress(packed)) if packed else 0.0,
            "no_speech_prob": heard.no_speech,
        }
        if asked.words:
            spoken = [i for i, token in enumerate(tokens) if token < self._eos]
            begins = None if times is None else [offset + times[i] for i in spoken]
            language = LANGUAGES.get(heard.language, "english")
            segment["words"] = words(self._tokenizer, [tokens[i] for i in spoken], begins, start, end, language)
        if text.strip():
            said.segments.append(segment)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _told(
        self, said: Transcript, sound: Sound, spoken: Spoken | None, language: str, probability: float
    ) -> dict[str, Any]:
        if spoken is not None:
            spoken.place(said.segments)
        return {
            "text": self._text(said.tokens),
            "language": language,
            "language_name": LANGUAGES.get(language, language),
            "language_probability": probability,
            "duration": round(sound.seconds, 3),
            "heard": round(sound.seconds if spoken is None else spoken.seconds, 3),
            "segments": said.segments,
        }

    def forward(self, items: Sequence[Item]) -> list[Heard]:
        model, asked = self._model, items[0].asked
        windows = [spectrum.window(at, self._window) for spectrum, at, _ in (item.value for item in items)]
        features = torch.stack(windows).to(model.device, model.dtype)
        encoded = self._encoded(features)
        known: list[str | None] = [language for _, _, language in (item.value for item in items)]
        if self._greedy and asked.beams == 1 and not items[0].kind[1] and not asked.words:  # type: ignore[index]
            return self._hear(self._greedy, encoded[0], known, asked.task)
        return self._generate(items, features, encoded, known)

    def _encoded(self, features: Tensor) -> Any:
        if self._encoder is None:
            return self._model.get_encoder()(features)
        return BaseModelOutput(last_hidden_state=self._encoder(features))

    def _hear(self, greedy: Greedy, encoded: Tensor, known: list[str | None], task: str) -> list[Heard]:
        heard, prefix = greedy.heard(encoded), [[self._start] for _ in known]
        if self.multilingual:
            told = known
            if None in known:
                told = list(self._listen(greedy.first(heard, self._start), known)[0])
            tasks = self._model.generation_config.task_to_id
            prefix = [[self._start, self._languages[f"<|{language}|>"], tasks[task]] for language in told]
        said = greedy.run(heard, prefix)
        languages, probabilities = self._listen(said.first, known)
        return [
            Heard(tokens, language, sure, silent, logprob)
            for tokens, language, sure, silent, logprob in zip(
                said.tokens, languages, probabilities, self._silent(said.first), said.logprobs, strict=True
            )
        ]

    def _silent(self, first: Tensor) -> list[float | None]:
        """How likely each window holds no speech, where the model tells."""
        if self._no_speech is None:
            return [None] * len(first)
        found: list[float | None] = first.softmax(-1)[:, self._no_speech].tolist()
        return found

    def _generate(self, items: Sequence[Item], features: Tensor, encoded: Any, known: list[str | None]) -> list[Heard]:
        """By transformers' own loop: beams, prompts and times of words."""
        model, asked = self._model, items[0].asked
        start = torch.full((len(items), 1), self._start, device=model.device)
        first = model(encoder_outputs=encoded, decoder_input_ids=start).logits[:, -1].float()
        silent = self._silent(first)
        languages, probabilities = self._listen(first, known)
        confidence = _Confidence(self._eos)
        prompt = items[0].kind[1]  # type: ignore[index]
        more: dict[str, Any] = {"task": asked.task, "language": languages} if self.multilingual else {}
        if prompt:
            more["prompt_ids"] = torch.tensor(prompt, device=model.device)
        aligned = asked.words and self._aligned
        attention = model.config._attn_implementation
        try:
            out = model.generate(
                input_features=features, encoder_outputs=encoded, return_timestamps=True, num_beams=asked.beams,
                force_unique_generate_call=True, return_token_timestamps=aligned or None,
                logits_processor=LogitsProcessorList([confidence]), **more,
            )  # fmt: skip
        finally:
            # Attention that tells where it looks is slower; generate() leaves it switched on.
            model.config._attn_implementation = attention
        sequences, times = (out["sequences"], out["token_timestamps"]) if isinstance(out, dict) else (out, None)
        logprobs = confidence.averages() if asked.beams == 1 else [None] * len(items)
        given = 1 + len(prompt) + (2 if self.multilingual else 0)
        heard = []
        for row, sequence in enumerate(sequences.tolist()):
            tokens = sequence[given:]
            tokens = tokens[: tokens.index(self._eos)] if self._eos in tokens else tokens
            begins = None if times is None else times[row][given : given + len(tokens)].tolist()
            heard.append(Heard(tokens, languages[row] or "en", probabilities[row], silent[row], logprobs[row], begins))
        return heard

    def _listen(self, first: Tensor, known: list[str | None]) -> tuple[list[str], list[float]]:
        """The language of each window, and how sure the model is where it is not told."""
        if not self.multilingual:
            return ["en"] * len(known), [1.0] * len(known)
        codes = list(self._languages)
        sure, best = first[:, [self._languages[code] for code in codes]].softmax(-1).max(-1)
        found = [codes[place][2:-2] for place in best.tolist()]
        return (
            [name or found[row] for row, name in enumerate(known)],
            [1.0 if name else sure[row].item() for row, name in enumerate(known)],
        )

    def example(self) -> bytes:
        out = BytesIO()
        with wave.open(out, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes(bytes(3200))
        return out.getvalue()


class _Confidence(LogitsProcessor):
    """Adds up the log-probabilities of greedy choices, each row's until it ends; changes nothing."""

    def __init__(self, eos: int) -> None:
        self._eos = eos
        self._sum: Tensor | None = None
        self._count: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        best = scores.float().log_softmax(-1).max(-1).values
        alive = (input_ids[:, -1] != self._eos).float()
        if self._sum is None or self._count is None:
            self._sum, self._count = torch.zeros_like(best), torch.zeros_like(best)
        self._sum += best * alive
        self._count += alive
        return scores

    def averages(self) -> list[float | None]:
        assert self._sum is not None and self._count is not None
        found = self._sum / self._count.clamp(min=1)
        return [float(value) for value in found]
