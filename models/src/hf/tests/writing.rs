//! Tests of writing folders and keeping their files.

use burn_megatron::checkpoint::{Checkpoint, CheckpointError, ElementType};

use super::*;

#[test]
fn what_is_exported_is_the_same() {
    let temporary = Temporary::new();
    for name in NAMES {
        let folder = open(name);
        for most in [u64::MAX, 20_000, 0] {
            let to = temporary.path(&format!("{name}-{most}"));
            let options = ExportOptions {
                max_shard_size: most,
                files: companion_files(folder.path()).unwrap(),
                ..ExportOptions::default()
            };
            let mut seen = 0;
            let exported = export(&folder, folder.config(), &to, &options, &mut |bytes| {
                seen += bytes;
            })
            .unwrap();
            assert_eq!(stored(&to), stored(&fixture(name)), "{name}");
            let again = HfFolder::open(&to).unwrap();
            assert_eq!(again.config(), folder.config(), "{name}");
            assert_eq!(
                (exported.bytes, exported.files == 1),
                (seen, most == u64::MAX)
            );
            assert!(most != 0 || exported.files == exported.tensors);
            assert!(to.join("generation_config.json").is_file());
        }
    }
    // Some versions of `transformers` require it.
    let bytes = fs::read(temporary.path(&format!("gpt2-{}/model.safetensors", u64::MAX))).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    // No temporary folder remains.
    let names = fs::read_dir(&temporary.0).unwrap();
    assert_eq!(names.count(), 3 * NAMES.len());
}

#[test]
fn a_checkpoint_keeps_all_that_a_folder_has() {
    let temporary = Temporary::new();
    for name in NAMES {
        let source = Temporary::copy(name);
        fs::write(source.path("tokenizer.json"), "{}").unwrap();
        let folder = HfFolder::open(&source.0).unwrap();
        let to = temporary.path(name);
        import(&folder, &to, &mut |_| {}).unwrap();
        let checkpoint = Checkpoint::open(&to).unwrap();
        assert_eq!(checkpoint.keys(), folder.keys());
        for key in folder.keys() {
            assert_eq!(checkpoint.tensor(&key), folder.tensor(&key));
            assert_eq!(
                whole(&checkpoint, &key),
                whole(&folder, &key),
                "{name} {key}"
            );
        }
        assert_eq!(
            checkpoint.metadata().config["model"]["family"],
            folder.config().family.name()
        );
        let (config, files) = export_config(&checkpoint, None).unwrap();
        assert_eq!(&config, folder.config());
        let files: Vec<_> = files.into_iter().map(|(name, _)| name).collect();
        assert_eq!(files, ["generation_config.json", "tokenizer.json"]);
        // Nothing is overwritten.
        let error = import(&folder, &to, &mut |_| {}).unwrap_err().to_string();
        assert!(error.starts_with("cannot write"), "{error}");
    }
}

#[test]
fn family_and_files_can_come_from_another_folder() {
    let temporary = Temporary::new();
    let (llama, qwen) = (open("llama3"), open("qwen2"));
    let checkpoint = import(&llama, &temporary.path("llama"), &mut |_| {}).unwrap();
    let (config, _) = export_config(&checkpoint, Some(llama.path())).unwrap();
    assert_eq!(&config, llama.config());
    let error = export_config::<ModelFamily>(&checkpoint, Some(qwen.path()))
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with(
            "has positions = {\"rotary\":{\"base\":500.0,\"scaling\":{\"llama3\":\
        {\"factor\":4.0,\"high\":4.0,\"low\":1.0,\"original\":16}}}}, but this one has {\"rotary\":\
        {\"base\":10000.0,\"scaling\":\"none\"}}"
        ),
        "{error}"
    );
}

#[test]
fn other_types_are_rounded_and_what_is_too_large_is_refused() {
    let temporary = Temporary::new();
    let folder = open("qwen2");
    let options = |dtype| ExportOptions {
        dtype: Some(dtype),
        ..ExportOptions::default()
    };
    let to = temporary.path("bf16");
    let run = |source: &dyn TensorSource, to: &Path, dtype| {
        export(source, folder.config(), to, &options(dtype), &mut |_| {})
    };
    run(&folder, &to, ElementType::Bf16).unwrap();
    let rounded = HfFolder::open(&to).unwrap();
    assert_eq!(rounded.config().dtype, Some(ElementType::Bf16));
    let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    for key in folder.keys() {
        let (exact, bf16) = (whole(&folder, &key), whole(&rounded, &key));
        for (exact, bf16) in exact.chunks(4).zip(bf16.chunks(2)) {
            let (exact, bf16) = (number(exact), number(&[&[0, 0], bf16].concat()));
            assert!(
                (exact - bf16).abs() <= exact.abs() / 256.0,
                "{key} {exact} {bf16}"
            );
        }
    }
    /// A folder with one element beyond the range of f16.
    struct Large(HfFolder);
    impl TensorSource for Large {
        fn name(&self) -> String {
            "large".into()
        }
        fn keys(&self) -> Vec<String> {
            self.0.keys()
        }
        fn tensor(&self, key: &str) -> Option<burn_megatron::checkpoint::TensorMeta> {
            self.0.tensor(key)
        }
        fn read(&self, key: &str, slice: &TensorSlice) -> Result<Vec<u8>, CheckpointError> {
            let mut bytes = self.0.read(key, slice)?;
            bytes[..4].copy_from_slice(&1e5f32.to_le_bytes());
            Ok(bytes)
        }
    }
    let to = temporary.path("f16");
    let error = run(&Large(open("qwen2")), &to, ElementType::F16).unwrap_err();
    insta::assert_snapshot!(
        error,
        @"large: model.embed_tokens.weight has elements that overflow F16"
    );
    // No partial folder remains.
    assert_eq!(fs::read_dir(&temporary.0).unwrap().count(), 1);
    run(&folder, &to, ElementType::F16).unwrap();
    let error = run(&folder, &to, ElementType::F16).unwrap_err().to_string();
    assert!(error.starts_with("cannot write"), "{error}");
}

#[test]
fn a_source_that_does_not_fit_is_refused() {
    let temporary = Temporary::new();
    let (llama, qwen3) = (open("llama3"), open("qwen3"));
    let run = |source: &HfFolder, config: &HfConfig| {
        let (to, options) = (temporary.path("to"), ExportOptions::default());
        let result = export(source, config, &to, &options, &mut |_| {});
        result.unwrap_err().to_string()
    };
    let error = run(&llama, qwen3.config());
    assert!(error.contains("has the shape"), "{error}");
    let mut config = llama.config().clone();
    config.model.layers = 3;
    let error = run(&llama, &config);
    assert!(error.contains(" has no model/blocks.2."), "{error}");
    config.model.layers = 1;
    let error = run(&llama, &config);
    assert!(
        error.contains(" has model/blocks.1.") && error.ends_with("the model does not have"),
        "{error}"
    );
    let to = temporary.path("to");
    let options = ExportOptions {
        files: vec![("../config.json".into(), vec![])],
        ..ExportOptions::default()
    };
    let error = export(&llama, llama.config(), &to, &options, &mut |_| {}).unwrap_err();
    assert!(
        error.to_string().contains("invalid companion file"),
        "{error}"
    );
    assert_eq!(fs::read_dir(&temporary.0).unwrap().count(), 0);
}
