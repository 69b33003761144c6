"""Sound is exact to the sample in every container, at every rate, cut anywhere."""

import json
import shutil
import struct
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge_data.dataset import open_dataset
from loongforge_data.errors import AudioError
from loongforge_data.modalities.audio import AudioSource, AudioTrack, mix, read_audio
from loongforge_data.modalities.resample import resample, resampled_length
from loongforge_data.modalities.wav import read_wav
from loongforge_data.synthetic import write_dataset


def encode(path, samples, rate, codec):
    """Write (channels, samples) float sound."""
    layout = {1: "mono", 2: "stereo"}[samples.shape[0]]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        resampler = av.AudioResampler(format=stream.codec_context.format.name, layout=layout, rate=rate)
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray((samples * 32767).astype(np.int16).T.reshape(1, -1)),
            format="s16",
            layout=layout,
        )
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return path


def wav_bytes(data, *, rate=8000, channels=1, width=2, code=1, size=None, tail=b"", order="<", magic=b"RIFF"):
    head = struct.pack(
        order + "4sIHHIIHH",
        b"fmt ",
        16,
        code,
        channels,
        rate,
        rate * channels * width,
        channels * width,
        8 * width,
    )
    body = head + b"data" + struct.pack(order + "I", len(data) if size is None else size) + data + tail
    return magic + struct.pack(order + "I", 4 + len(body)) + b"WAVE" + body


CLICK = np.zeros((1, 16000), np.float32)
CLICK[0, :40] = 0.9
CLICK[0, 8000:8040] = 0.9
CONTAINERS = {
    "click.wav": "pcm_s16le",
    "click.flac": "flac",
    "click.mp3": "libmp3lame",
    "click.m4a": "aac",
    "click.mkv": "aac",
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_onset_and_length_are_right_in_every_container(tmp_path, name):
    """D57: priming is not heard; the padding at the end is cut where the container states a length."""
    track = read_audio(encode(tmp_path / name, CLICK, 16000, CONTAINERS[name]))
    loud = np.flatnonzero(np.abs(track.samples[0]) > 0.3)
    assert loud[0] == 0
    assert loud[loud > 4000][0] == 8000
    if name != "click.mkv":
        assert track.samples.shape == (1, 16000)
    else:
        assert 16000 <= track.samples.shape[1] <= 17024


def test_raw_adts_says_that_its_priming_is_unknown(tmp_path):
    """D57: .aac cannot store the delay."""
    track = read_audio(encode(tmp_path / "click.aac", CLICK, 16000, "aac"))
    assert np.flatnonzero(np.abs(track.samples[0]) > 0.3)[0] == 1024
    assert any("ADTS" in note for note in track.notes)


@pytest.mark.parametrize("name", ["step.wav", "step.flac", "step.mp3", "step.m4a", "step.opus"])
def test_a_window_equals_slicing_the_full_decode(tmp_path, name):
    """D56: 6 s of noise with a 60 dB step at 3 s; read [3.0, 3.2]."""
    rate = 48000 if name.endswith("opus") else 16000
    noise = np.random.default_rng(0).uniform(-0.8, 0.8, (1, 6 * rate)).astype(np.float32)
    noise[:, : 3 * rate] *= 1e-3
    codec = {"wav": "pcm_s16le", "flac": "flac", "mp3": "libmp3lame", "m4a": "aac", "opus": "libopus"}
    track = read_audio(encode(tmp_path / name, noise, rate, codec[name.rsplit(".", 1)[1]]))
    window, mask = track.window(3.0, 3.2)
    assert not mask.any()
    assert np.array_equal(window, track.samples[:, 3 * rate : round(3.2 * rate)])
    quiet, _ = track.window(2.7, 2.9)
    assert float(np.abs(quiet).mean()) < 0.02 < float(np.abs(window[:, 400:]).mean())


def test_the_mp3_sample_starts_at_its_first_sample(shared_data):
    """D56: start stamp 0.138 s, and still sample 0 is sample 0."""
    track = read_audio(shared_data / "media" / "nasa_13013.mp4.audio.mp3")
    assert float(track.start) == pytest.approx(0.138, abs=1e-3)
    window, _ = track.window(0.0, 0.5)
    assert np.array_equal(window, track.samples[:, :4000])


# -- rate conversion -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [8000, 16000, 48000])
@pytest.mark.parametrize("channels", [1, 2])
def test_no_sample_is_lost_in_rate_conversion(rate, channels):
    """D55: 4 s at 44.1 kHz; the length is round(N x ratio) and chunks joined equal the whole."""
    times = np.arange(4 * 44100) / 44100
    sine = np.stack([np.sin(2 * np.pi * 440 * (c + 1) * times) for c in range(channels)])
    whole = resample(sine, 44100, rate)
    assert whole.shape == (channels, 4 * rate)
    edges = np.linspace(0, 4 * rate, 8).astype(int)
    parts = [resample(sine, 44100, rate, start=a, stop=b) for a, b in pairwise(edges)]
    assert np.array_equal(np.concatenate(parts, axis=1), whole)
    ideal = np.stack(
        [np.sin(2 * np.pi * 440 * (c + 1) * np.arange(4 * rate) / rate) for c in range(channels)]
    )
    assert np.abs(whole - ideal)[:, 300:-300].max() < 1e-4


def test_rate_conversion_agrees_with_the_scaler_of_ffmpeg():
    rng = np.random.default_rng(0)
    spectrum = np.fft.rfft(rng.normal(size=44100))
    spectrum[6000:] = 0
    signal = np.fft.irfft(spectrum)[None].astype(np.float32)
    signal /= np.abs(signal).max() * 1.2
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=16000)
    frame = av.AudioFrame.from_ndarray(signal, format="fltp", layout="mono")
    frame.sample_rate = 44100
    theirs = np.concatenate(
        [f.to_ndarray() for f in [*resampler.resample(frame), *resampler.resample(None)]], axis=1
    )
    ours = resample(signal, 44100, 16000)
    length = min(ours.shape[1], theirs.shape[1])
    assert np.abs(ours[:, 200 : length - 200] - theirs[:, 200 : length - 200]).max() < 0.01


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 400),
    rate=st.sampled_from([3, 8, 44100, 48000]),
    new_rate=st.sampled_from([2, 8, 16000, 48000]),
    cut=st.floats(0, 1),
)
def test_any_cut_of_the_output_gives_the_same_samples(count, rate, new_rate, cut):
    signal = np.random.default_rng(count).normal(size=(2, count))
    total = resampled_length(count, rate, new_rate)
    assert total == int(Fraction(count * new_rate, rate) + Fraction(1, 2))
    middle = round(cut * total)
    whole = resample(signal, rate, new_rate)
    halves = [
        resample(signal, rate, new_rate, start=0, stop=middle),
        resample(signal, rate, new_rate, start=middle),
    ]
    assert np.array_equal(np.concatenate(halves, axis=1), whole)


def test_pieces_of_a_fraction_of_a_second_sum_up_to_the_whole():
    """D58: 1.16534 s at 24 kHz to 16 kHz in pieces of 0.1 s."""
    count = round(1.16534 * 24000)
    samples = np.random.default_rng(0).normal(size=(1, count)).astype(np.float32)
    track = AudioTrack(path="-", samples=samples, rate=24000, start=Fraction(0), notes=())
    pieces = [track.window(k * 0.1, (k + 1) * 0.1, rate=16000) for k in range(12)]
    joined = np.concatenate([values for values, _ in pieces], axis=1)
    masks = np.concatenate([mask for _, mask in pieces])
    assert np.array_equal(joined[:, ~masks], resample(samples, 24000, 16000))
    assert (~masks).sum() == resampled_length(count, 24000, 16000)


def test_windows_beyond_both_ends_are_masked_silence():
    track = AudioTrack(path="-", samples=np.ones((1, 100), np.float32), rate=100, start=Fraction(0), notes=())
    values, mask = track.window(-0.1, 1.1)
    assert values.shape == (1, 120)
    assert mask.tolist() == [True] * 10 + [False] * 100 + [True] * 10
    assert values[0, mask].tolist() == [0.0] * 20
    assert track.window(5.0, 5.2)[1].all()
    with pytest.raises(ValueError, match="ends before it starts"):
        track.window(1.0, 0.5)


def test_mixed_rates_and_channels_reach_the_declared_ones(tmp_path):
    """D62: 8k mono, 44.1k stereo, 48k opus and a 16-channel wav in one batch."""
    rng = np.random.default_rng(0)
    many = (rng.uniform(-1, 1, (8000, 16)) * 30000).astype("<i2")
    (tmp_path / "many.wav").write_bytes(wav_bytes(many.tobytes(), channels=16))
    paths = [
        encode(tmp_path / "a.wav", rng.uniform(-0.5, 0.5, (1, 8000)), 8000, "pcm_s16le"),
        encode(tmp_path / "b.flac", rng.uniform(-0.5, 0.5, (2, 44100)), 44100, "flac"),
        encode(tmp_path / "c.opus", rng.uniform(-0.5, 0.5, (1, 48000)), 48000, "libopus"),
        tmp_path / "many.wav",
    ]
    for path in paths:
        track = read_audio(path)
        assert track.converted(rate=16000, channels=1).shape == (1, 16000)
        values, mask = track.window(0.25, 0.75, rate=16000, channels=1)
        assert values.shape == (1, 8000)
        assert not mask.any()
    stereo = read_audio(paths[1])
    assert np.allclose(mix(stereo.samples, 1)[0], stereo.samples.mean(axis=0), atol=1e-7)
    assert np.array_equal(mix(stereo.samples[:1], 2)[1], stereo.samples[0])
    with pytest.raises(AudioError, match="2 channels, 3 are wanted"):
        mix(stereo.samples, 3)


# -- WAV -------------------------------------------------------------------------------------------------


def test_a_chunk_after_the_data_is_not_heard(tmp_path):
    """D59: 24-bit mono with an odd data size, its pad byte, and an odd LIST chunk."""
    values = [-(1 << 23), -1, 0, 1, (1 << 23) - 1]
    data = b"".join(v.to_bytes(3, "little", signed=True) for v in values)
    assert len(data) % 2 == 1
    tail = b"\0" + b"LIST" + struct.pack("<I", 7) + b"INFOabc" + b"\0"
    path = tmp_path / "clip.wav"
    path.write_bytes(wav_bytes(data, width=3, tail=tail))
    wav = read_wav(path)
    assert wav.samples.shape == (1, 5)
    assert wav.samples[0].tolist() == [-1.0, -(2.0**-23), 0.0, 2.0**-23, pytest.approx(1 - 2.0**-23)]
    assert wav.notes == ()


@pytest.mark.parametrize(
    ("size", "word"), [(0xFFFFFFFF, "placeholder"), (0, "placeholder"), (10**9, "header claims")]
)
def test_a_header_that_lies_about_its_size_is_cut_and_reported(tmp_path, size, word):
    """D60: no huge allocation, and a note."""
    data = np.arange(100, dtype="<i2").tobytes()
    path = tmp_path / "clip.wav"
    path.write_bytes(wav_bytes(data, size=size))
    track = read_audio(path)
    assert track.samples.shape == (1, 100)
    assert word in track.notes[0]


def test_empty_and_unfinished_wav_files_are_errors(tmp_path):
    """D60."""
    path = tmp_path / "clip.wav"
    for data, message in (
        (wav_bytes(b""), "no samples"),
        (wav_bytes(b"")[:40], "no data chunk"),
        (b"RIFF\x05\0\0\0WAVEf", "no format chunk"),
        (b"", "empty"),
        (wav_bytes(b"abcd", channels=0), "impossible WAV format"),
    ):
        path.write_bytes(data)
        with pytest.raises(AudioError, match=message):
            read_audio(path)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("order", ["<", ">"])
def test_both_byte_orders_of_every_width_are_read(tmp_path, width, order):
    """D61: RIFX is read, not heard as noise."""
    rng = np.random.default_rng(width)
    limit = 1 << (8 * width - 1)
    values = [int(v) for v in rng.integers(-limit, limit - 1, 20)] if width < 8 else [-limit, 0, limit - 1, 7]
    values += [0] * (len(values) % 2)
    if width == 1:
        data = bytes(v + 128 for v in values)
    else:
        data = b"".join(v.to_bytes(width, "little" if order == "<" else "big", signed=True) for v in values)
    path = tmp_path / "clip.wav"
    magic = b"RIFF" if order == "<" else b"RIFX"
    path.write_bytes(wav_bytes(data, channels=2, width=width, order=order, magic=magic))
    want = (np.array(values, np.float64) / limit).reshape(-1, 2).T
    assert np.allclose(read_wav(path).samples, want, atol=1e-7)


def test_float_and_extensible_wav_in_both_orders(tmp_path):
    """D61: the sub-format GUID comes in either byte order."""
    values = np.array([0.5, -0.25, 1.0, -1.0])
    path = tmp_path / "clip.wav"
    for order, magic in (("<", b"RIFF"), (">", b"RIFX")):
        for width in (4, 8):
            path.write_bytes(
                wav_bytes(
                    values.astype(f"{order}f{width}").tobytes(), width=width, code=3, order=order, magic=magic
                )
            )
            assert np.allclose(read_wav(path).samples[0], values)
        for guid in ("<I", ">I"):
            head = struct.pack(order + "HHIIHHHHI", 0xFFFE, 1, 8000, 16000, 2, 16, 22, 16, 4)
            head += struct.pack(guid, 1) + b"\0\0\0\x10\x80\0\0\xaa\0\x38\x9b\x71"
            data = (values * 32767).astype(order + "i2").tobytes()
            body = (
                b"fmt "
                + struct.pack(order + "I", len(head))
                + head
                + b"data"
                + struct.pack(order + "I", len(data))
                + data
            )
            path.write_bytes(magic + struct.pack(order + "I", 4 + len(body)) + b"WAVE" + body)
            assert np.allclose(read_wav(path).samples[0], values, atol=1e-4)


def test_the_scipy_collection_of_odd_wav_files():
    """D59 to D61 on files others have made; every one is read or refused by name."""
    scipy = pytest.importorskip("scipy")
    folder = Path(scipy.__file__).parent / "io/tests/data"
    paths = sorted(folder.glob("*.wav"))
    if not paths:
        pytest.skip("this scipy ships no test data")
    refused = []
    for path in paths:
        try:
            track = read_audio(path)
        except AudioError as error:
            refused.append((path.name, error.message))
            continue
        assert np.isfinite(track.samples).all()
        assert np.abs(track.samples).max() <= 1.0
    names = {name for name, _ in refused}
    assert names <= {
        "test-44100Hz-le-1ch-4bytes-early-eof-no-data.wav",
        "test-44100Hz-le-1ch-4bytes-incomplete-chunk.wav",
        "test-8000Hz-le-3ch-5S-24bit-inconsistent.wav",
    }
    early = read_audio(folder / "test-44100Hz-le-1ch-4bytes-early-eof.wav")
    assert early.samples.shape == (1, 236)
    assert "header claims 17640 bytes" in early.notes[0]
    big = read_audio(folder / "test-44100Hz-be-1ch-4bytes.wav")
    little = read_audio(folder / "test-44100Hz-le-1ch-4bytes.wav")
    assert np.allclose(big.samples, little.samples, atol=1e-6)


# -- in a data set ---------------------------------------------------------------------------------------


def ramp_set(root):
    """A set with a sound file per episode whose value is its own sample number."""
    write_dataset(root, episodes=2, frames=[30, 15], cameras=1, size=(64, 64))
    for episode, length in enumerate((30, 15)):
        path = root / f"audio/mic/episode_{episode:06d}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        ramp = np.arange(length * 8000 // 30, dtype="<i2")
        path.write_bytes(wav_bytes(ramp.tobytes()))
    return root


def test_sound_windows_of_a_sample_are_exact_to_the_sample(tmp_path):
    root = ramp_set(tmp_path / "set")
    source = AudioSource(rate=8000, before=0.1, after=0.05, path="audio/mic/episode_{episode_index:06d}.wav")
    dataset = open_dataset(root, audio={"mic": source})
    assert source.samples == 1200
    for i in (0, 1, 14, 29, 30, 44):
        sample = dataset[i]
        first = round((int(sample["frame_index"]) / 30 - 0.1) * 8000)
        numbers = np.arange(first, first + 1200)
        length = (30 if i < 30 else 15) * 8000 // 30
        inside = (numbers >= 0) & (numbers < length)
        assert sample["mic"].shape == (1, 1200)
        assert np.array_equal(sample["mic_is_pad"], ~inside)
        assert np.array_equal(np.rint(sample["mic"][0] * 32768)[inside], numbers[inside])


def test_sound_inside_a_camera_file_follows_its_pictures(shared_data, tmp_path):
    """Sound and pictures of one container share a clock; the sound of frame n lies at its own pts."""
    root = write_dataset(tmp_path / "set", episodes=1, frames=30, cameras=1, size=(64, 64))
    key = "observation.images.front"
    info = json.loads((root / "meta/info.json").read_text())
    info["features"][key]["shape"] = [180, 320, 3]
    info["fps"] = 25
    (root / "meta/info.json").write_text(json.dumps(info))
    target = root / f"videos/chunk-000/{key}/episode_000000.mp4"
    shutil.copyfile(shared_data / "media/nasa_13013.mp4", target)
    source = AudioSource(rate=8000, before=0.0, after=0.1, channels=2, camera=key)
    dataset = open_dataset(root, audio={"sound": source}, verify="paths")
    track = read_audio(target)
    for i in (0, 7, 29):
        want = track.samples[:, i * 320 : i * 320 + 800]
        assert np.array_equal(dataset[i]["sound"], want)


def test_sound_sources_need_exactly_one_place():
    with pytest.raises(ValueError, match="either camera or path"):
        AudioSource(rate=8000, before=1.0)
    with pytest.raises(ValueError, match="window with an extent"):
        AudioSource(rate=8000, before=0.0, path="x")


def test_a_video_without_sound_says_so(tmp_path, clips):
    path = clips.write(tmp_path / "clip.mp4", frames=4, options={"bf": "0"})
    with pytest.raises(AudioError, match=r"no sound \(streams: video\)"):
        read_audio(path)
    with pytest.raises(AudioError, match="missing"):
        read_audio(tmp_path / "none.wav")
    (tmp_path / "bad.mp3").write_bytes(b"\1" * 500)
    with pytest.raises(AudioError):
        read_audio(tmp_path / "bad.mp3")
