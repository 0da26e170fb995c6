//! Rejected folders.

use burn_megatron::checkpoint::CheckpointError;

use super::*;

#[test]
fn files_that_lie_are_refused() {
    const INDEX: &str = "model.safetensors.index.json";
    const SECOND: &str = "model-00002-of-00003.safetensors";
    let broken = |change: &dyn Fn(&Temporary)| {
        let copy = Temporary::copy("llama3");
        change(&copy);
        copy.refusal()
    };
    type Change<'a> = &'a dyn Fn(&Temporary);
    let cases: [(Change, &str); 11] = [
        (
            &|copy| fs::remove_file(copy.path(SECOND)).unwrap(),
            "model-00002-of-00003.safetensors: ",
        ),
        (
            &|copy| fs::remove_file(copy.path(INDEX)).unwrap(),
            "has neither model.safetensors nor",
        ),
        (
            &|copy| fs::remove_file(copy.path("config.json")).unwrap(),
            "cannot read ",
        ),
        (
            &|copy| {
                copy.edit(INDEX, |index| {
                    index["weight_map"]["lm_head.weight"] = json!(SECOND)
                })
            },
            "model-00003-of-00003.safetensors has lm_head.weight, which the index does not list there",
        ),
        (
            &|copy| copy.edit(INDEX, |index| index["weight_map"]["extra"] = json!(SECOND)),
            "extra is not in model-00002-of-00003.safetensors, where the index lists it",
        ),
        (
            &|copy| copy.edit(INDEX, |index| index["weight_map"]["extra"] = json!("../x")),
            "extra is in \"../x\": expected the name of a file next to the index",
        ),
        (
            &|copy| {
                let text = fs::read_to_string(copy.path(INDEX)).unwrap();
                let twice = r#""weight_map": {"a": "a", "a": "b","#;
                let text = text.replacen(r#""weight_map": {"#, twice, 1);
                fs::write(copy.path(INDEX), text).unwrap();
            },
            "it has \"a\" twice",
        ),
        (
            &|copy| fs::write(copy.path(INDEX), "[]").unwrap(),
            "model.safetensors.index.json: ",
        ),
        (
            &|copy| {
                let bytes = fs::read(copy.path(SECOND)).unwrap();
                fs::write(copy.path(SECOND), &bytes[..bytes.len() - 1]).unwrap();
            },
            "but its header gives",
        ),
        (
            &|copy| {
                let mut bytes = fs::read(copy.path(SECOND)).unwrap();
                bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
                fs::write(copy.path(SECOND), bytes).unwrap();
            },
            "its header has 18446744073709551615 bytes: expected at most 25664",
        ),
        (
            &|copy| fs::write(copy.path(SECOND), "short").unwrap(),
            "it has 5 bytes, too few for a header",
        ),
    ];
    for (change, wanted) in cases {
        let error = broken(change);
        assert!(error.contains(wanted), "{error:?} has no {wanted:?}");
    }
}

#[test]
fn tensors_that_do_not_fit_the_config_are_refused() {
    let config = |key: &str, to: Value| {
        let copy = Temporary::copy("llama3");
        copy.edit("config.json", |config| config[key] = to);
        copy.refusal()
    };
    let error = config("vocab_size", json!(60));
    assert!(
        error.contains("model.embed_tokens.weight has the shape [61, 32]"),
        "{error}"
    );
    let error = config("num_hidden_layers", json!(3));
    assert!(
        error.contains("has no model.layers.2.input_layernorm.weight"),
        "{error}"
    );
    let error = config("num_hidden_layers", json!(1 << 14));
    assert!(
        error.contains("gives 16384 layers, but the files have only 21"),
        "{error}"
    );
    let error = config("num_hidden_layers", json!(1));
    assert!(
        error.contains("has model.layers.1.input_layernorm.weight"),
        "{error}"
    );
    let error = config("logit_scale", json!(2));
    assert!(
        error.contains("config.json: unknown logit_scale = 2 for llama"),
        "{error}"
    );
    // An output that differs from the embedding that it should be tied to.
    let error = config("tie_word_embeddings", json!(true));
    assert!(
        error.contains("lm_head.weight differs from model.embed_tokens.weight"),
        "{error}"
    );
}

#[test]
fn types_that_are_not_read_are_refused() {
    let key = "model.layers.0.self_attn.k_proj.weight";
    let copy = rewrite("qwen2", |tensors| {
        let k = tensors.get_mut(key).unwrap();
        (k.0, k.2) = ("I8".into(), k.2[..k.2.len() / 4].to_vec());
    });
    let wanted =
        format!("{key} has elements of I8: expected F64, F32, F16 or BF16, or a matrix of F8_E4M3");
    assert!(copy.refusal().ends_with(&wanted), "{}", copy.refusal());
    let copy = rewrite("qwen2", |tensors| {
        let k = tensors.get_mut(key).unwrap();
        (k.0, k.2) = ("BF16".into(), k.2[..k.2.len() / 2].to_vec());
    });
    assert!(
        copy.refusal().contains("expected equal types"),
        "{}",
        copy.refusal()
    );
}

#[test]
fn what_is_asked_for_must_be_there() {
    let folder = open("qwen2");
    let error = folder
        .read("model/nothing", &TensorSlice::whole(&[1]))
        .unwrap_err();
    assert!(matches!(error, CheckpointError::Missing { .. }));
    let slice = TensorSlice {
        offset: vec![60, 0],
        shape: vec![2, 32],
    };
    let error = folder.read("model/embedding.weight", &slice).unwrap_err();
    assert!(matches!(error, CheckpointError::OutOfBounds { .. }));
    // Truncating an open file gives an error, not a crash.
    let copy = Temporary::copy("qwen2");
    let folder = HfFolder::open(&copy.0).unwrap();
    let file = fs::File::options()
        .write(true)
        .open(copy.path("model.safetensors"))
        .unwrap();
    file.set_len(3000).unwrap();
    let error = folder
        .read("model/norm.weight", &TensorSlice::whole(&[32]))
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("cannot read"), "{error}");
}
