//! The fuzz targets.

use burn_megatron::checkpoint::{
    CheckpointMetadata, Checksum, ElementType, FileEntry, Manifest, ObjectEntry, ShardEntry,
    TensorEntry, TensorSlice, parse_header,
};
use burn_megatron::pipeline::schedule::{
    Schedule, ScheduleConfig, ScheduleKind, generate, validate,
};
use burn_megatron_cli::check_recipe;
use burn_megatron_data::indexed::IndexHeader;
use burn_megatron_data::tokenizer::{TokenFileInfo, Tokenizer};
use burn_megatron_models::hf::{HfConfig, ModelFamily, ShardIndex};
use burn_megatron_rendezvous::read_session;
use burn_megatron_verify::Layout;
use serde_json::json;

use super::Target;

const TINY: &str = include_str!("../../../cli/src/tiny.toml");
const GPT2: &str = include_str!("../../../examples/recipes/gpt2.toml");

/// Reads a fixture file of `burn-megatron-models`.
macro_rules! hf {
    ($name:literal) => {
        include_bytes!(concat!("../../../models/tests/fixtures/hf/", $name)).to_vec()
    };
}

/// Reads a fixture file of `burn-megatron`.
macro_rules! data {
    ($name:literal) => {
        include_bytes!(concat!(
            "../../../burn-megatron-data/tests/fixtures/data/",
            $name
        ))
        .to_vec()
    };
}

/// The size of a .bin file in bytes. It is larger than the indices of the seeds need.
const BIN_BYTES: u64 = 1 << 14;

/// All targets.
pub const TARGETS: &[Target] = &[
    Target {
        name: "hf_config",
        seeds: || {
            vec![
                hf!("gpt2/config.json"),
                hf!("llama3/config.json"),
                hf!("llama-yarn/config.json"),
                hf!("llama-longrope/config.json"),
                hf!("mistral/config.json"),
                hf!("qwen2/config.json"),
                hf!("qwen3/config.json"),
            ]
        },
        run: |input| {
            HfConfig::<ModelFamily>::parse(input).is_ok_and(|config| config.to_json().is_ok())
        },
    },
    Target {
        name: "hf_index",
        seeds: || vec![hf!("llama3/model.safetensors.index.json")],
        run: |input| ShardIndex::parse(input).is_ok(),
    },
    Target {
        name: "layout",
        seeds: || {
            texts(&[
                "tp2-sp-dp2-mb1",
                "tp1-dp4-z3-hsdp2",
                "pp2-dp2/interleaved/v2",
            ])
        },
        run: |input| text(input).is_some_and(|text| text.parse::<Layout>().is_ok()),
    },
    Target {
        name: "manifest",
        seeds: || vec![without_checksum(&small_manifest())],
        run: |input| Manifest::parse(input).is_ok() || manifest(&with_checksum(input)),
    },
    Target {
        name: "recipe",
        seeds: || {
            texts(&[
                TINY,
                GPT2,
                "[fp8]\nrecipe = \"delayed\"\n[train]\nsteps = 30",
            ])
        },
        run: |input| text(input).is_some_and(|text| check_recipe(text).is_ok()),
    },
    Target {
        name: "rendezvous",
        seeds: sessions,
        run: read_session,
    },
    Target {
        name: "safetensors_header",
        seeds: || vec![small_safetensors()],
        run: |input| parse_header(input, input.len() as u64).is_ok(),
    },
    Target {
        name: "schedule_csv",
        seeds: schedules,
        run: |input| {
            let schedule = text(input).map(|text| Schedule::from_csv("fuzzed.csv", text));
            schedule.is_some_and(|schedule| schedule.is_ok_and(|s| validate(&s).is_ok()))
        },
    },
    Target {
        name: "sidecar",
        seeds: sidecars,
        run: |input| {
            let info = TokenFileInfo::parse(input).map(|info| info.bytes_per_token());
            info.is_ok()
        },
    },
    Target {
        name: "token_index",
        seeds: || vec![data!("a.idx"), data!("b.idx"), data!("small.idx")],
        run: |input| {
            let header = IndexHeader::parse(input);
            header.is_ok_and(|header| header.check(input, BIN_BYTES).is_ok())
        },
    },
];

fn text(input: &[u8]) -> Option<&str> {
    std::str::from_utf8(input).ok()
}

fn texts(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

/// Returns the messages of a rank of two at the rendezvous after the hello, one per line.
fn sessions() -> Vec<Vec<u8>> {
    let hello = json!({
        "version": env!("CARGO_PKG_VERSION"), "rank": 1, "size": 2, "world": 0,
        "host": "node\u{1b}[2J", "process": 7, "gather": 60.0, "silence": 30.0,
    });
    let stood = json!({ "At": "call 3 barrier over world [0, 1]" });
    let call = json!({ "group": 0, "sequence": 3 });
    let ranks = json!([{ "first": 0, "count": 2, "step": 1 }]);
    let runs = [
        vec![
            json!({ "Alive": "Nowhere" }),
            json!({ "Post": { "key": "id", "value": [0, 10, 255] } }),
            json!({ "Read": { "key": "id" } }),
            json!({ "Returned": [[0, 7]] }),
        ],
        vec![
            json!({ "Where": { "call": call, "ranks": ranks } }),
            json!({ "FindReturned": { "call": call, "ranks": ranks } }),
            json!({ "Stands": {
                "question": 0, "stand": { "position": stood, "came": true, "call": "barrier" },
            } }),
            json!({ "Failed": {
                "cause": { "kind": "Own", "message": "no such file\u{7}" },
                "stood": { "Past": "call 2 barrier over world [0, 1]" },
            } }),
        ],
        vec![json!({ "Alive": { "Silent": [3, { "Gone": stood }] } })],
    ];
    let session = |lines: Vec<serde_json::Value>| {
        let all = [hello.clone()].into_iter().chain(lines);
        all.map(|line| line.to_string() + "\n")
            .collect::<String>()
            .into_bytes()
    };
    runs.into_iter().map(session).collect()
}

fn schedules() -> Vec<Vec<u8>> {
    let kinds = [
        (ScheduleKind::OneFOneB, 2),
        (ScheduleKind::ZbV, 2),
        (ScheduleKind::GPipe, 3),
    ];
    let csv = |(kind, ranks)| {
        let schedule = generate(&ScheduleConfig::new(kind, ranks, 4)).expect("a usual schedule");
        schedule.to_csv().into_bytes()
    };
    kinds.into_iter().map(csv).collect()
}

/// Returns a manifest without its checksum. With the checksum, every mutation would be rejected.
fn without_checksum(manifest: &Manifest) -> Vec<u8> {
    let mut bytes = manifest.to_bytes();
    bytes.truncate(bytes.len() - with_checksum(b"").len());
    bytes
}

/// Returns a manifest body with its checksum appended.
fn with_checksum(body: &[u8]) -> Vec<u8> {
    let end = format!("\"checksum\": \"{}\"\n}}\n", Checksum::of(body));
    [body, end.as_bytes()].concat()
}

/// Parses a manifest, writes it and parses it again.
fn manifest(bytes: &[u8]) -> bool {
    let Ok(manifest) = Manifest::parse(bytes) else {
        return false;
    };
    let again = Manifest::parse(&manifest.to_bytes()).expect("a written manifest is valid");
    assert_eq!(again.tensors, manifest.tensors);
    true
}

/// Returns a manifest of two files: a tensor in two slices, one per file, an unsplit tensor, and an object.
fn small_manifest() -> Manifest {
    let checksums = || vec![Checksum::of(b"some bytes")];
    let file = |name: &str, size| FileEntry {
        name: name.into(),
        size,
        header: 64,
        checksum: Checksum::of(name.as_bytes()),
    };
    let shard = |file, begin, offset: [usize; 2], shape: [usize; 2]| ShardEntry {
        file,
        begin,
        slice: TensorSlice {
            offset: offset.to_vec(),
            shape: shape.to_vec(),
        },
        checksums: checksums(),
    };
    let tensor = |key: &str, dtype, shape: [usize; 2], shards| TensorEntry {
        key: key.into(),
        dtype,
        shape: shape.to_vec(),
        shards,
    };
    Manifest {
        metadata: CheckpointMetadata {
            step: 7,
            samples: 56,
            layout: "tp2".into(),
            config: json!({ "model": { "layers": 2 } }),
            state: json!({ "loss_scale": 1.5 }),
        },
        files: vec![
            file("part-00000", 64 + 48 + 8),
            file("part-00001", 64 + 48 + 5),
        ],
        tensors: vec![
            tensor(
                "model/norm",
                ElementType::Bf16,
                [1, 4],
                vec![shard(0, 64 + 48, [0, 0], [1, 4])],
            ),
            tensor(
                "model/weight",
                ElementType::F32,
                [4, 6],
                vec![shard(0, 64, [0, 0], [4, 3]), shard(1, 64, [0, 3], [4, 3])],
            ),
        ],
        objects: vec![ObjectEntry {
            key: "fp8".into(),
            file: 1,
            begin: 64 + 48,
            size: 5,
            checksums: checksums(),
        }],
    }
}

/// Returns a complete file of three tensors.
fn small_safetensors() -> Vec<u8> {
    let header = json!({
        "__metadata__": { "format": "pt" },
        "weight": { "dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24] },
        "empty": { "dtype": "BF16", "shape": [0, 3], "data_offsets": [24, 24] },
        "scale": { "dtype": "F64", "shape": [], "data_offsets": [24, 32] },
    });
    let header = header.to_string().into_bytes();
    let length = (header.len() as u64).to_le_bytes();
    [&length[..], &header, &[7; 32]].concat()
}

/// Returns the sidecar of a token file of bytes.
fn sidecars() -> Vec<Vec<u8>> {
    let mut info = TokenFileInfo::new(&Tokenizer::bytes());
    (info.tokens, info.bytes, info.documents) = (120, 300, 4);
    info.inputs = vec!["corpus.jsonl".into()];
    info.key = Some("text".into());
    let text = serde_json::to_vec(&info);
    vec![text.expect("text and numbers are valid JSON")]
}
