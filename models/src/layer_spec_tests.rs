use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use burn_megatron::comm::ParallelContext;
use burn_megatron::model::ModelConfig;
use serde_json::json;

use super::*;
use crate::MoeConfig;

#[test]
fn a_layer_is_plain_data() {
    let config = TransformerConfig {
        moe: Some(MoeConfig::deepseek()),
        layer_windows: vec![4, 0],
        ..TransformerConfig::llama()
    };
    let kinds = (0..4).map(|number| config.layer(number)).map(|layer| {
        let text = json!(layer).to_string();
        let again: LayerSpec = serde_json::from_str(&text).unwrap();
        assert_eq!(json!(again).to_string(), text);
        let MixerSpec::Attention(attention) = again.mixer else {
            panic!("{text}")
        };
        (
            attention.window,
            matches!(again.feed_forward, FeedForwardSpec::Experts(_)),
        )
    });
    // The first layer of DeepSeek has no experts.
    let expected = [
        (Some(4), false),
        (None, true),
        (Some(4), true),
        (None, true),
    ];
    assert_eq!(kinds.collect::<Vec<_>>(), expected);
    let latent = TransformerConfig::deepseek().layer(0);
    assert!(matches!(latent.mixer, MixerSpec::Latent(_)));
}

/// Collects the module paths of parameters.
#[derive(Default)]
struct Paths {
    path: Vec<String>,
    found: Vec<String>,
}

impl Paths {
    fn enter(&mut self, name: &str) {
        self.path.push(name.into());
    }

    fn exit(&mut self, name: &str) {
        assert_eq!(self.path.pop().as_deref(), Some(name));
    }

    fn find(&mut self) {
        let part = self.path.get(..3).unwrap_or(&self.path).join(".");
        if self.found.last() != Some(&part) {
            self.found.push(part);
        }
    }
}

impl ModuleVisitor for Paths {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.enter(name);
    }

    fn exit_module(&mut self, name: &str, _: &str) {
        self.exit(name);
    }

    fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
        self.find();
    }
}

impl ModuleMapper for Paths {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.enter(name);
    }

    fn exit_module(&mut self, name: &str, _: &str) {
        self.exit(name);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.find();
        param
    }
}

/// The paths must not change, because they are the keys of tensors in checkpoints.
#[test]
fn the_paths_of_a_block_name_the_kinds_of_its_parts() {
    for (config, mixer, feed_forwards) in [
        (TransformerConfig::gpt2(), "attention", ["mlp", "mlp"]),
        (TransformerConfig::mixtral(), "attention", ["moe", "moe"]),
        (TransformerConfig::deepseek(), "mla", ["mlp", "moe"]),
    ] {
        let config = TransformerConfig {
            layers: 2,
            ..config
        };
        let model = config.init(&ParallelContext::single(), &Device::flex());
        let model = model.unwrap().module;
        let (mut visited, mut mapped) = (Paths::default(), Paths::default());
        model.visit(&mut visited);
        let count = model.num_params();
        let model = model.map(&mut mapped).valid();
        assert_eq!(visited.found, mapped.found);
        assert_eq!(model.num_params(), count);
        let blocks = visited
            .found
            .iter()
            .filter(|path| path.starts_with("blocks."));
        let expected = feed_forwards.iter().enumerate().flat_map(|(number, fed)| {
            ["attention_norm", mixer, "mlp_norm", fed].map(|part| format!("blocks.{number}.{part}"))
        });
        assert_eq!(
            blocks.cloned().collect::<Vec<_>>(),
            expected.collect::<Vec<_>>()
        );
    }
}
