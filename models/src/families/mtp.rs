//! The tensors of the MTP modules. The files store them as additional blocks after the last block.

use super::ModelFamily;
use super::tensors::{MappingList, within};
use crate::TransformerConfig;
use crate::hf::HfNames;

/// Returns the prefix of the tensor names of an MTP module.
fn prefix(model: &TransformerConfig, depth: usize) -> String {
    format!("model.layers.{}", model.layers + depth)
}

fn depths(model: &TransformerConfig) -> usize {
    model.mtp.as_ref().map_or(0, |mtp| mtp.layers)
}

impl MappingList<'_> {
    /// Adds the tensors of all MTP modules.
    pub fn further_tokens(&mut self, family: ModelFamily, config: &TransformerConfig) {
        for depth in 0..depths(config) {
            let (own, theirs) = (format!("mtp.{depth}"), prefix(config, depth));
            let (both, hidden) = ([&own[..], &theirs], config.hidden);
            for (path, name) in [
                ("embedding_norm", "enorm"),
                ("hidden_norm", "hnorm"),
                ("norm", "shared_head.norm"),
            ] {
                self.norm(within(both, path, name), config);
            }
            // The input of the projection is the embedding, followed by the hidden state.
            let parts = [("eh_proj", hidden)];
            self.linear(both, "projection", 2 * hidden, &parts, false);
            let own = format!("{own}.block");
            self.llama_block(family, [&own, &theirs], config.layers - 1, config);
        }
    }
}

/// Returns the copies of the embedding and the output layer that the files contain for each MTP module.
pub(super) fn copies(names: HfNames, model: &TransformerConfig) -> Vec<(String, &'static str)> {
    let of_depth = |depth| {
        let prefix = prefix(model, depth);
        let output = if model.tied {
            names.embedding
        } else {
            names.output
        };
        [
            (format!("{prefix}.embed_tokens.weight"), names.embedding),
            (format!("{prefix}.shared_head.head.weight"), output),
        ]
    };
    (0..depths(model)).flat_map(of_depth).collect()
}

/// Returns the model without multi-token prediction if the files contain none of its tensors. `transformers` does not
/// write these tensors, but it keeps the number of MTP modules in `config.json`.
pub(super) fn without_missing(
    model: &TransformerConfig,
    has: &dyn Fn(&str) -> bool,
) -> Option<(TransformerConfig, &'static str)> {
    model.mtp.as_ref()?;
    let first = format!("{}.eh_proj.weight", prefix(model, 0));
    let model = TransformerConfig {
        mtp: None,
        ..model.clone()
    };
    let what = "multi-token prediction (num_nextn_predict_layers)";
    (!has(&first)).then_some((model, what))
}
