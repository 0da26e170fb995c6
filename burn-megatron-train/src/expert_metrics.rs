//! Metrics of the load of the experts (the distribution of tokens over experts) in a training step.
//!
//! The load of an expert is the number of tokens that it processed. A token that is routed to several experts counts
//! for each of them, as one (token, expert) pair. The *even share* is the load of each expert if all experts have the
//! same load. The maximal violation (arXiv:2408.15664) is [`LayerLoad::max`] minus 1.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::json_float;
use burn_megatron::nn::moe::RouterLossKind;
use burn_megatron::text_table::Table;

/// The metrics of the experts in a training step, which the routers of all pipeline stages have reported.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertMetrics {
    /// The step, counted from 1.
    pub step: usize,
    /// The metrics of each layer with experts, in the order of the model.
    pub layers: Vec<LayerLoad>,
}

/// The load of one layer with experts.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerLoad {
    /// The path of the layer in the model, such as `blocks.0.moe`.
    pub layer: String,
    /// The load of each expert: the number of (token, expert) pairs that it processed on all ranks and in all
    /// micro-batches of the step.
    pub load: Vec<u64>,
    /// The number of (token, expert) pairs that were dropped because of the expert capacity.
    pub dropped: u64,
    /// The mean of each router loss, multiplied by its coefficient.
    pub losses: Vec<(RouterLossKind, f64)>,
}

impl ExpertMetrics {
    /// Returns the record that is written to the metrics file in each step.
    pub fn summary(&self) -> ExpertSummary {
        ExpertSummary {
            step: self.step,
            layers: self.layers.iter().map(LayerLoad::summary).collect(),
        }
    }

    /// Returns the record that is written to the metrics file before an evaluation.
    pub fn load(&self) -> ExpertLoad {
        let counts = |layer: &LayerLoad| LayerCounts {
            layer: layer.layer.clone(),
            load: layer.load.clone(),
        };
        ExpertLoad {
            step: self.step,
            layers: self.layers.iter().map(counts).collect(),
        }
    }

    /// Returns the layer whose [`max`](LayerLoad::max) is largest, and this maximum. Returns `None` if no expert has
    /// processed a token.
    pub fn most_loaded(&self) -> Option<(&LayerLoad, f64)> {
        let layers = self.layers.iter().map(|layer| (layer, layer.max()));
        layers
            .filter(|(_, max)| !max.is_nan())
            .max_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    /// Returns the fraction of (token, expert) pairs that were dropped, over all layers. It is NaN if there are no
    /// pairs.
    pub fn dropped_fraction(&self) -> f64 {
        let dropped: u64 = self.layers.iter().map(|layer| layer.dropped).sum();
        let pairs: u64 = self.layers.iter().map(LayerLoad::pairs).sum();
        dropped as f64 / pairs as f64
    }
}

impl LayerLoad {
    /// Returns the smallest load of an expert, divided by the mean load of the layer's experts. It is NaN if no expert
    /// has processed a token.
    pub fn min(&self) -> f64 {
        even_shares(&self.load).reduce(f64::min).unwrap_or(f64::NAN)
    }

    /// Returns the largest load of an expert, divided by the mean load of the layer's experts. It is NaN if no expert
    /// has processed a token.
    pub fn max(&self) -> f64 {
        even_shares(&self.load).reduce(f64::max).unwrap_or(f64::NAN)
    }

    /// Returns the normalized entropy of the load. It is 1 if all experts have the same load or there is a single
    /// expert, and 0 if one of several experts processes all (token, expert) pairs. It is NaN if no expert has
    /// processed a token.
    pub fn entropy(&self) -> f64 {
        let total = self.load.iter().sum::<u64>() as f64;
        if total == 0.0 {
            return f64::NAN;
        }
        if self.load.len() == 1 {
            return 1.0;
        }
        let parts = self.load.iter().map(|&load| load as f64 / total);
        let terms = parts
            .filter(|part| *part > 0.0)
            .map(|part| part * part.ln());
        let entropy = -terms.sum::<f64>() / (self.load.len() as f64).ln();
        entropy.clamp(0.0, 1.0) // but for rounding it is there
    }

    /// Returns the fraction of (token, expert) pairs that were dropped. It is NaN if there are no pairs.
    pub fn dropped_fraction(&self) -> f64 {
        self.dropped as f64 / self.pairs() as f64
    }

    /// Returns the number of computed and dropped pairs.
    fn pairs(&self) -> u64 {
        self.load.iter().sum::<u64>() + self.dropped
    }

    fn summary(&self) -> LayerSummary {
        LayerSummary {
            layer: self.layer.clone(),
            min: self.min(),
            max: self.max(),
            entropy: self.entropy(),
            dropped: self.dropped_fraction(),
            losses: self.losses.iter().copied().collect(),
        }
    }
}

/// Returns each load as a multiple of the even share; NaN if all are 0.
pub(super) fn even_shares(load: &[u64]) -> impl Iterator<Item = f64> {
    let even = load.iter().sum::<u64>() as f64 / load.len() as f64;
    load.iter().map(move |&load| load as f64 / even)
}

/// The balance of the expert load in a step. In a metrics file, the record has `"kind": "experts"`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertSummary {
    /// The step, counted from 1.
    pub step: usize,
    /// One entry for each layer with experts.
    pub layers: Vec<LayerSummary>,
}

/// The balance of the expert load in one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerSummary {
    /// The path of the layer: see [`LayerLoad::layer`].
    pub layer: String,
    /// The smallest load of an expert, divided by the mean load of the layer's experts: see [`LayerLoad::min`].
    #[serde(with = "json_float")]
    pub min: f64,
    /// The largest load of an expert, divided by the mean load of the layer's experts: see [`LayerLoad::max`].
    #[serde(with = "json_float")]
    pub max: f64,
    /// The normalized entropy of the load: see [`LayerLoad::entropy`].
    #[serde(with = "json_float")]
    pub entropy: f64,
    /// The fraction of (token, expert) pairs that were dropped: see [`LayerLoad::dropped_fraction`].
    #[serde(with = "json_float")]
    pub dropped: f64,
    /// The mean of each router loss: see [`LayerLoad::losses`]. The field is absent if there are no router losses.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        with = "json_float::map"
    )]
    pub losses: BTreeMap<RouterLossKind, f64>,
}

/// The load of each expert in the step before an evaluation. In a metrics file, the record has `"kind": "expert_load"`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// The step, counted from 1.
    pub step: usize,
    /// One entry for each layer with experts.
    pub layers: Vec<LayerCounts>,
}

/// The load of each expert of one layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerCounts {
    /// The path of the layer: see [`LayerLoad::layer`].
    pub layer: String,
    /// The load of each expert: see [`LayerLoad::load`].
    pub load: Vec<u64>,
}

impl ExpertSummary {
    /// Formats the metrics as a table with a row for each layer and a column for each kind of router loss.
    pub fn table(&self) -> Table {
        let layers = || self.layers.iter();
        let kinds: BTreeSet<_> = layers().flat_map(|layer| layer.losses.keys()).collect();
        let mut head = ["layer", "min", "max", "entropy", "dropped"]
            .map(String::from)
            .to_vec();
        head.extend(kinds.iter().map(ToString::to_string));
        let row = |layer: &LayerSummary| {
            let mut cells = vec![
                layer.layer.clone(),
                format!("{:.2}", layer.min),
                format!("{:.2}", layer.max),
                format!("{:.4}", layer.entropy),
                format!("{:.2} %", 100.0 * layer.dropped),
            ];
            let losses = kinds.iter().map(|kind| layer.losses.get(kind));
            cells.extend(losses.map(|loss| loss.map_or("-".into(), |loss| format!("{loss:.3e}"))));
            cells
        };
        // These columns are left out if there is no room: first the entropy, then the losses from the last.
        let optional = std::iter::once(3).chain((5..head.len()).rev());
        let optional: Vec<_> = optional.collect();
        Table::new(std::iter::once(head).chain(layers().map(row))).with_optional(optional)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(load: &[u64], dropped: u64) -> LayerLoad {
        LayerLoad {
            layer: "blocks.0.moe".into(),
            load: load.to_vec(),
            dropped,
            losses: vec![],
        }
    }

    /// Returns the minimum, maximum, entropy and dropped fraction of a load.
    fn numbers(load: &[u64], dropped: u64) -> [f64; 4] {
        let layer = layer(load, dropped);
        [
            layer.min(),
            layer.max(),
            layer.entropy(),
            layer.dropped_fraction(),
        ]
    }

    #[test]
    fn even_and_uneven_loads_have_the_numbers_of_their_definitions() {
        assert_eq!(numbers(&[5; 4], 0), [1.0, 1.0, 1.0, 0.0]);
        assert_eq!(numbers(&[0, 0, 8, 0], 0), [0.0, 4.0, 0.0, 0.0]);
        assert_eq!(numbers(&[7], 7), [1.0, 1.0, 1.0, 0.5]);
        // In bits, the entropy of 1/2, 1/4, 1/8, 1/8 is 1.75 of 2.
        let [min, max, entropy, dropped] = numbers(&[4, 2, 1, 1], 2);
        assert_eq!([min, max, dropped], [0.5, 2.0, 0.2]);
        assert!((entropy - 0.875).abs() < 1e-15, "{entropy}");
        for experts in 2..300 {
            let entropy = layer(&vec![3; experts], 0).entropy();
            assert!(
                (1.0 - 1e-12..=1.0).contains(&entropy),
                "{experts}: {entropy}"
            );
        }
    }

    #[test]
    fn without_tokens_and_without_experts_there_are_no_numbers() {
        for load in [&[0, 0, 0][..], &[]] {
            assert!(numbers(load, 0).iter().all(|number| number.is_nan()));
            assert_eq!(layer(load, 3).dropped_fraction(), 1.0);
        }
    }

    #[test]
    fn the_most_loaded_layer_is_one_with_tokens() {
        let named = |name: &str, load: &[u64]| LayerLoad {
            layer: name.into(),
            ..layer(load, 0)
        };
        let of = |layers| ExpertMetrics { step: 3, layers };
        let metrics = of(vec![
            named("even", &[2, 2]),
            named("none", &[0, 0]),
            named("uneven", &[1, 3]),
        ]);
        let (layer, max) = metrics.most_loaded().expect("two have a load");
        assert_eq!((layer.layer.as_str(), max), ("uneven", 1.5));
        assert_eq!(of(vec![named("none", &[0, 0])]).most_loaded(), None);
    }

    #[test]
    fn a_table_has_a_column_for_each_loss() {
        let mut first = layer(&[4, 2, 1, 1], 2);
        first.losses = vec![
            (RouterLossKind::ZLoss, 0.25),
            (RouterLossKind::SequenceBalance, 0.0125),
        ];
        let mut second = layer(&[0, 0], 0);
        second.layer = "blocks.10.moe".into();
        second.losses = vec![(RouterLossKind::ZLoss, f64::NAN)];
        let metrics = ExpertMetrics {
            step: 0,
            layers: vec![first, second],
        };
        let table = "\
layer           min   max  entropy  dropped  sequence-balance    z-loss
blocks.0.moe   0.50  2.00   0.8750  20.00 %          1.250e-2  2.500e-1
blocks.10.moe   NaN   NaN      NaN    NaN %                 -       NaN";
        assert_eq!(metrics.summary().table().fit(None), table);
    }
}
