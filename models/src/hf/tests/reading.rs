//! Reading folders.

use burn_megatron::checkpoint::{ElementType, MODEL};
use proptest::prelude::*;

use super::*;

/// The position of each part of a joined weight, written out.
#[test]
fn parts_are_turned_and_lie_side_by_side() {
    let folder = open("llama3");
    let stored = stored(&fixture("llama3"));
    let at = |name: &str, row: usize, column: usize| {
        let (_, shape, bytes) = &stored[&format!("model.layers.1.{name}.weight")];
        bytes[(row * shape[1] + column) * 4..][..4].to_vec()
    };
    let own = |path: &str, row, column| {
        let slice = TensorSlice {
            offset: vec![row, column],
            shape: vec![1, 1],
        };
        let key = format!("{MODEL}blocks.1.{path}.weight");
        folder.read(&key, &slice).unwrap()
    };
    // 4 heads and 2 groups of 8 features.
    assert_eq!(own("attention.qkv", 5, 7), at("self_attn.q_proj", 7, 5));
    assert_eq!(
        own("attention.qkv", 5, 32 + 3),
        at("self_attn.k_proj", 3, 5)
    );
    assert_eq!(
        own("attention.qkv", 31, 48 + 9),
        at("self_attn.v_proj", 9, 31)
    );
    assert_eq!(own("mlp.up", 2, 47), at("mlp.gate_proj", 47, 2));
    assert_eq!(own("mlp.up", 2, 48), at("mlp.up_proj", 0, 2));
    assert_eq!(own("mlp.down", 40, 3), at("mlp.down_proj", 3, 40));
    assert_eq!(
        own("attention.output", 3, 30),
        at("self_attn.o_proj", 30, 3)
    );
}

/// The position of each part of an expert, written out.
#[test]
fn experts_lie_one_after_the_other() {
    for (name, module, [gate, up, down], width) in [
        ("mixtral", "block_sparse_moe", ["w1", "w3", "w2"], 48),
        (
            "qwen3-moe",
            "mlp",
            ["gate_proj", "up_proj", "down_proj"],
            24,
        ),
    ] {
        let (folder, stored) = (open(name), stored(&fixture(name)));
        let size = folder.tensor("model/norm.weight").unwrap().dtype.size();
        let at = |name: &str, row: usize, column: usize| {
            let (_, shape, bytes) = &stored[&format!("model.layers.1.{module}.{name}.weight")];
            bytes[(row * shape[1] + column) * size..][..size].to_vec()
        };
        let own = |path: &str, offset: &[usize]| {
            let slice = TensorSlice {
                offset: offset.to_vec(),
                shape: vec![1; offset.len()],
            };
            let key = format!("{MODEL}blocks.1.moe.{path}");
            folder.read(&key, &slice).unwrap()
        };
        assert_eq!(own("router.gate", &[5, 3]), at("gate", 3, 5));
        let expert = |which: &str| format!("experts.2.{which}");
        assert_eq!(own("experts.up", &[2, 5, 7]), at(&expert(gate), 7, 5));
        assert_eq!(
            own("experts.up", &[2, 31, width + 3]),
            at(&expert(up), 3, 31)
        );
        assert_eq!(own("experts.down", &[2, 9, 30]), at(&expert(down), 30, 9));
    }
}

/// The positions of latent attention and of shared experts, written out.
#[test]
fn latents_lie_side_by_side_and_pairs_stay() {
    let (folder, stored) = (open("deepseek-v3"), stored(&fixture("deepseek-v3")));
    let at = |name: &str, row: usize, column: usize| {
        let (_, shape, bytes) = &stored[&format!("model.layers.1.{name}.weight")];
        bytes[(row * shape[1] + column) * 4..][..4].to_vec()
    };
    let own = |path: &str, row, column| {
        let slice = TensorSlice {
            offset: vec![row, column],
            shape: vec![1, 1],
        };
        let key = format!("{MODEL}blocks.1.{path}.weight");
        folder.read(&key, &slice).unwrap()
    };
    // 20 features of queries, then 16 of keys and values and 4 with a position.
    assert_eq!(own("mla.down", 5, 7), at("self_attn.q_a_proj", 7, 5));
    let latent = "self_attn.kv_a_proj_with_mqa";
    assert_eq!(own("mla.down", 5, 20 + 17), at(latent, 17, 5));
    assert_eq!(own("mla.query_up", 3, 13), at("self_attn.q_b_proj", 13, 3));
    assert_eq!(own("mla.kv_up", 9, 61), at("self_attn.kv_b_proj", 61, 9));
    assert_eq!(own("mla.output", 31, 2), at("self_attn.o_proj", 2, 31));
    let shared = "mlp.shared_experts";
    let gate = at(&format!("{shared}.gate_proj"), 23, 4);
    assert_eq!(own("moe.shared.mlp.up", 4, 23), gate);
    let value = at(&format!("{shared}.up_proj"), 0, 4);
    assert_eq!(own("moe.shared.mlp.up", 4, 24), value);
    let down = at(&format!("{shared}.down_proj"), 4, 23);
    assert_eq!(own("moe.shared.mlp.down", 23, 4), down);
    let bias = "model/blocks.1.moe.router.expert_bias";
    let stored = &stored["model.layers.1.mlp.gate.e_score_correction_bias"];
    assert_eq!(whole(&folder, bias), stored.2);
}

/// The experts of gpt-oss, and the same in MXFP4, which is transposed.
#[test]
fn packed_experts_have_two_orientations() {
    let [experts, hidden, width] = [4, 32, 64];
    let (folder, plain) = (open("gpt-oss"), stored(&fixture("gpt-oss")));
    let module = "model.layers.1.mlp.experts";
    let element = |folder: &HfFolder, path: &str, offset: [usize; 3]| {
        let slice = TensorSlice {
            offset: offset.into(),
            shape: vec![1; 3],
        };
        let key = format!("{MODEL}blocks.1.moe.experts.{path}");
        folder.read(&key, &slice).unwrap()
    };
    let at = |name: &str, [expert, row, column]: [usize; 3]| {
        let (_, shape, bytes) = &plain[&format!("{module}.{name}")];
        let at = (expert * shape[1] + row) * shape[2] + column;
        bytes[at * 2..][..2].to_vec()
    };
    for (own, stored) in [([3, 5, 7], [3, 5, 14]), ([3, 5, width + 7], [3, 5, 15])] {
        assert_eq!(element(&folder, "up", own), at("gate_up_proj", stored));
    }
    let place = [2, width - 1, 9];
    assert_eq!(element(&folder, "down", place), at("down_proj", place));

    // Scales of 2^-2, codes that count.
    let copy = rewrite("gpt-oss", |tensors| {
        for (name, output, input) in [
            ("gate_up_proj", 2 * width, hidden),
            ("down_proj", hidden, width),
        ] {
            let name = format!("{module}.{name}");
            tensors.remove(&name).unwrap();
            let groups = experts * output * input / 32;
            let codes = (0..groups * 16)
                .map(|at| (at * 5 + at / 16) as u8)
                .collect();
            let shape = vec![experts, output, input / 32];
            tensors.insert(
                format!("{name}_blocks"),
                ("U8".into(), [&shape[..], &[16]].concat(), codes),
            );
            tensors.insert(
                format!("{name}_scales"),
                ("U8".into(), shape, vec![125; groups]),
            );
        }
    });
    let folder = HfFolder::open(&copy.0).unwrap();
    let stored = stored(&copy.0);
    let value = |name: &str, [expert, output, input]: [usize; 3]| {
        let shape = &stored[&format!("{module}.{name}_scales")].1;
        let at = (expert * shape[1] + output) * shape[2] * 32 + input;
        let codes = stored[&format!("{module}.{name}_blocks")].2[at / 2];
        let code = codes >> (4 * (at % 2)) & 15;
        let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
        let sign = if code & 8 == 0 { 0.25 } else { -0.25 };
        half::bf16::from_f32(sign * size).to_le_bytes().to_vec()
    };
    for (own, stored) in [([3, 5, 7], [3, 14, 5]), ([3, 6, width + 7], [3, 15, 6])] {
        assert_eq!(element(&folder, "up", own), value("gate_up_proj", stored));
    }
    let own = element(&folder, "down", [2, width - 1, 9]);
    assert_eq!(own, value("down_proj", [2, 9, width - 1]));
}

/// `transformers` keeps the number of MTP layers in `config.json`, but writes no tensors for them.
#[test]
fn a_model_has_no_further_tokens_without_their_tensors() {
    let copy = Temporary::copy("deepseek-v3");
    copy.edit("config.json", |config| {
        config["num_nextn_predict_layers"] = json!(1)
    });
    let (folder, plain) = (HfFolder::open(&copy.0).unwrap(), open("deepseek-v3"));
    assert_eq!((folder.keys(), plain.left_out()), (plain.keys(), None));
    assert_eq!(folder.config().model, plain.config().model);
    insta::assert_snapshot!(
        folder.left_out().unwrap(),
        @"without multi-token prediction (num_nextn_predict_layers), because the files have none of its tensors"
    );
}

/// Files repeat the embedding and the output layer for multi-token prediction.
#[test]
fn copies_of_tensors_must_be_equal() {
    let whole = open("deepseek-v3-mtp");
    for name in ["embed_tokens", "shared_head.head"] {
        let name = format!("model.layers.2.{name}.weight");
        let without = rewrite("deepseek-v3-mtp", |tensors| {
            tensors.remove(&name).unwrap();
        });
        assert_eq!(HfFolder::open(&without.0).unwrap().keys(), whole.keys());
        let other = rewrite("deepseek-v3-mtp", |tensors| {
            tensors.get_mut(&name).unwrap().2[7] ^= 1;
        });
        let error = HfFolder::open(&other.0).unwrap_err().to_string();
        assert!(error.contains(&format!("{name} differs from")), "{error}");
    }
}

#[test]
fn a_folder_has_the_tensors_of_its_model() {
    for name in NAMES {
        let folder = open(name);
        let model = &folder.config().model;
        let tied = folder.tensor("model/output.weight").is_none();
        assert_eq!(tied, model.tied, "{name}");
        let embedding = folder.tensor("model/embedding.weight").unwrap();
        assert_eq!(embedding.shape, [61, 32]);
        let in_16_bits = [
            "deepseek-v2",
            "gemma2",
            "gemma3",
            "gpt-oss",
            "mistral",
            "olmoe",
            "qwen3-moe",
        ];
        let wanted = if in_16_bits.contains(&name) {
            ElementType::Bf16
        } else {
            ElementType::F32
        };
        assert_eq!(
            (embedding.dtype, folder.config().dtype),
            (wanted, Some(wanted))
        );
        let gates = if model.activation.is_gated() { 2 } else { 1 };
        let of = |path: &str| {
            folder
                .tensor(&format!("model/blocks.1.{path}"))
                .unwrap()
                .shape
        };
        match &model.moe {
            None => assert_eq!(of("mlp.up.weight"), [32, gates * model.mlp_width()]),
            Some(moe) => {
                let width = moe.expert_width.unwrap_or(model.mlp_width());
                let experts = moe.experts;
                assert_eq!(of("moe.experts.up"), [experts, 32, 2 * width]);
                assert_eq!(of("moe.experts.down"), [experts, width, 32]);
                assert_eq!(of("moe.router.gate"), [32, experts]);
            }
        }
    }
}

proptest! {
    #[test]
    fn a_box_is_a_box_of_the_whole(
        name in prop::sample::select(NAMES.to_vec()), key in any::<prop::sample::Index>(),
        ends in prop::collection::vec((0.0..1.0, 0.0..1.0), 3),
    ) {
        let folder = open(name);
        let keys = folder.keys();
        let meta = folder.tensor(&keys[key.index(keys.len())]).unwrap();
        let mut slice = TensorSlice::whole(&meta.shape);
        for (dim, (a, b)) in ends.iter().enumerate().take(meta.shape.len()) {
            let at = |x: &f64| (x * (meta.shape[dim] + 1) as f64) as usize;
            (slice.offset[dim], slice.shape[dim]) = (at(a).min(at(b)), at(a).abs_diff(at(b)));
        }
        let (all, size) = (whole(&folder, &meta.key), meta.dtype.size());
        let wanted = cut(&all, &meta.shape, &slice, size);
        prop_assert_eq!(folder.read(&meta.key, &slice).unwrap(), wanted);
    }

    /// Damaged files are read or rejected, without a panic.
    #[test]
    fn a_broken_byte_does_no_harm(
        file in prop::sample::select(vec!["config.json", "model.safetensors.index.json",
            "model-00002-of-00003.safetensors"]),
        at in 0usize..2500, byte in any::<u8>(),
    ) {
        let copy = Temporary::copy("llama3");
        let mut bytes = fs::read(copy.path(file)).unwrap();
        let at = at % bytes.len();
        bytes[at] = byte;
        fs::write(copy.path(file), &bytes).unwrap();
        if let Ok(folder) = HfFolder::open(&copy.0) {
            let config = folder.config().clone();
            for key in folder.keys() {
                whole(&folder, &key);
            }
            config.to_json().unwrap();
        }
        let _ = ShardIndex::parse(&bytes);
    }
}

#[test]
fn older_names_and_tables_are_understood() {
    // GPT-2's published files: without the prefix, with attention masks.
    let copy = rewrite("gpt2", |tensors| {
        let named = std::mem::take(tensors).into_iter();
        let strip = |name: String| name.strip_prefix("transformer.").unwrap().to_string();
        tensors.extend(named.map(|(name, value)| (strip(name), value)));
        let mask = ("U8".to_string(), vec![1, 1, 2, 2], vec![1, 0, 1, 1]);
        tensors.insert("h.0.attn.bias".into(), mask);
    });
    let (old, new) = (HfFolder::open(&copy.0).unwrap(), open("gpt2"));
    assert_eq!(old.keys(), new.keys());
    let key = "model/blocks.1.attention.qkv.weight";
    assert_eq!(whole(&old, key), whole(&new, key));
    // A tied output that is present and equal.
    let copy = rewrite("qwen2", |tensors| {
        let embedding = tensors["model.embed_tokens.weight"].clone();
        tensors.insert("lm_head.weight".into(), embedding);
    });
    assert_eq!(
        HfFolder::open(&copy.0).unwrap().keys(),
        open("qwen2").keys()
    );
}
