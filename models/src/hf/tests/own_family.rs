//! Tests of a family whose model is not a transformer.

use burn_megatron::checkpoint::{CheckpointError, ElementType, TensorMeta};
use burn_megatron::model::{ModelConfig, StageBuilder};
use burn_megatron::nn::BuildError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Map;

use super::*;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ToyConfig {
    pub vocabulary: usize,
    pub hidden: usize,
}

impl ModelConfig for ToyConfig {
    type Model = crate::Transformer;

    fn layers(&self) -> usize {
        1
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn context(&self) -> usize {
        8
    }

    fn build(&self, _: &StageBuilder) -> Result<Self::Model, BuildError> {
        unreachable!("only its configuration and its weights are exchanged")
    }
}

/// The `model_type` of [`ToyConfig`].
#[derive(Clone, Copy, Debug, PartialEq)]
struct Toy;

impl HfFamily for Toy {
    type Model = ToyConfig;

    const ALL: &'static [Self] = &[Toy];

    fn names(self) -> HfNames {
        HfNames {
            model_type: "toy",
            architecture: "ToyForCausalLM",
            prefix: "model.",
            embedding: "model.embed.weight",
            output: "lm_head.weight",
            buffers: &[],
        }
    }

    fn of_model(_: &ToyConfig) -> Self {
        Toy
    }

    fn read(self, keys: &mut ConfigKeys) -> Result<ToyConfig, HfConfigError> {
        Ok(ToyConfig {
            vocabulary: keys.needed("vocab_size", ConfigKeys::size)?,
            hidden: keys.needed("hidden_size", ConfigKeys::size)?,
        })
    }

    fn write(self, model: &ToyConfig) -> Map<String, Value> {
        let keys = [
            ("vocab_size", model.vocabulary),
            ("hidden_size", model.hidden),
        ];
        keys.map(|(key, size)| (key.into(), json!(size)))
            .into_iter()
            .collect()
    }

    fn tensors(self, model: &ToyConfig) -> Vec<WeightMapping> {
        let ToyConfig { vocabulary, hidden } = *model;
        let mut list = vec![WeightMapping::whole(
            "embedding.weight",
            "model.embed.weight",
            &[vocabulary, hidden],
        )];
        list.extend(WeightMapping::linear(
            "output",
            hidden,
            &[("lm_head".into(), vocabulary)],
            false,
        ));
        list
    }
}

/// A source of tensors in which element `n` of each parameter has the value `n`.
struct Counted;

impl TensorSource for Counted {
    fn name(&self) -> String {
        "counted".into()
    }

    fn keys(&self) -> Vec<String> {
        ["model/embedding.weight", "model/output.weight"]
            .map(String::from)
            .into()
    }

    fn tensor(&self, key: &str) -> Option<TensorMeta> {
        let shape = match key {
            "model/embedding.weight" => vec![3, 2],
            "model/output.weight" => vec![2, 3],
            _ => return None,
        };
        Some(TensorMeta {
            key: key.into(),
            dtype: ElementType::F32,
            shape,
        })
    }

    fn read(&self, key: &str, slice: &TensorSlice) -> Result<Vec<u8>, CheckpointError> {
        assert_eq!(slice.shape, self.tensor(key).unwrap().shape);
        Ok(bytes([0, 1, 2, 3, 4, 5]))
    }
}

fn bytes(numbers: [u8; 6]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| f32::from(*number).to_le_bytes())
        .collect()
}

#[test]
fn a_family_of_another_model_is_exchanged() {
    let temporary = Temporary::new();
    let model = ToyConfig {
        vocabulary: 3,
        hidden: 2,
    };
    let config = HfConfig::<Toy>::of(&model).unwrap();
    let to = Temporary(temporary.path("hf"));
    export(
        &Counted,
        &config,
        &to.0,
        &ExportOptions::default(),
        &mut |_| {},
    )
    .unwrap();
    let files = stored(&to.0);
    let of = |name: &str| (files[name].1.clone(), files[name].2.clone());
    assert_eq!(
        of("model.embed.weight"),
        (vec![3, 2], bytes([0, 1, 2, 3, 4, 5]))
    );
    assert_eq!(
        of("lm_head.weight"),
        (vec![3, 2], bytes([0, 3, 1, 4, 2, 5]))
    );

    let folder = HfFolder::<Toy>::open_family(&to.0).unwrap();
    assert_eq!(
        (&folder.config().model, folder.config().dtype),
        (&model, Some(ElementType::F32))
    );
    let checkpoint = import(&folder, &temporary.path("checkpoint"), &mut |_| {}).unwrap();
    assert_eq!(checkpoint.metadata().config["model"]["family"], "toy");
    for key in Counted.keys() {
        let wanted = whole(&Counted, &key);
        assert_eq!(
            [whole(&folder, &key), whole(&checkpoint, &key)],
            [wanted.clone(), wanted]
        );
    }
    assert_eq!(
        export_config::<Toy>(&checkpoint, None).unwrap().0,
        *folder.config()
    );

    let error = to.refusal();
    assert!(
        error.contains("unknown model_type = \"toy\": expected gpt2, llama, "),
        "{error}"
    );
    to.edit("config.json", |config| {
        config["model_type"] = json!("llama")
    });
    let error = HfFolder::<Toy>::open_family(&to.0).unwrap_err().to_string();
    assert!(
        error.ends_with("config.json: unknown model_type = \"llama\": expected toy"),
        "{error}"
    );
}
