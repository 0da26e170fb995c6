//! Metrics of the load of the experts in a training step.
//!
//! The load of an expert is the number of (token, expert) pairs that it computed. The load of a layer is even if all
//! experts have the same number of pairs, the even share. The maximal violation (arXiv:2408.15664) is
//! [`LayerLoad::max`] minus 1.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::json_float;
use burn_megatron::nn::moe::RouterLossKind;
use burn_megatron::text_table::Table;

/// The reports of the routers of all pipeline stages about a training step.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertMetrics {
    /// The step, from 1.
    pub step: usize,
    /// The layers with experts, in the order of the model.
    pub layers: Vec<LayerLoad>,
}

/// The load of one layer with experts.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerLoad {
    /// Its path in the model, such as `blocks.0.moe`.
    pub layer: String,
    /// The number of (token, expert) pairs that each expert computed, over all ranks and micro-batches of the step.
    pub load: Vec<u64>,
    /// The number of pairs that were dropped because of the expert capacity.
    pub dropped: u64,
    /// The mean of each router loss, with its coefficient applied.
    pub losses: Vec<(RouterLossKind, f64)>,
}

impl ExpertMetrics {
    /// Returns the record that each step writes to a metrics file.
    pub fn summary(&self) -> ExpertSummary {
        ExpertSummary {
            step: self.step,
            layers: self.layers.iter().map(LayerLoad::summary).collect(),
        }
    }

    /// Returns the record that an evaluation writes to a metrics file.
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

    /// Returns the layer with the largest [`max`](LayerLoad::max), and this maximum; `None` if no expert has a load.
    pub fn most_loaded(&self) -> Option<(&LayerLoad, f64)> {
        let layers = self.layers.iter().map(|layer| (layer, layer.max()));
        layers
            .filter(|(_, max)| !max.is_nan())
            .max_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    /// Returns the fraction of dropped pairs over all layers; NaN if there are no pairs.
    pub fn dropped_fraction(&self) -> f64 {
        let dropped: u64 = self.layers.iter().map(|layer| layer.dropped).sum();
        let pairs: u64 = self.layers.iter().map(LayerLoad::pairs).sum();
        dropped as f64 / pairs as f64
    }
}

impl LayerLoad {
    /// Returns the smallest load of an expert as a multiple of the even share; NaN if no expert has a load.
    pub fn min(&self) -> f64 {
        even_shares(&self.load).reduce(f64::min).unwrap_or(f64::NAN)
    }

    /// Returns the largest load of an expert as a multiple of the even share; NaN if no expert has a load.
    pub fn max(&self) -> f64 {
        even_shares(&self.load).reduce(f64::max).unwrap_or(f64::NAN)
    }

    /// Returns the normalized entropy of the load: 1 for an even load or a single expert, 0 if one of several experts
    /// computes all pairs. NaN if no expert has a load.
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

    /// Returns the fraction of dropped pairs; NaN if there are no pairs.
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

/// Balance of the load in a step: `"kind": "experts"` in a metrics file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertSummary {
    /// The step, from 1.
    pub step: usize,
    /// The layers with experts.
    pub layers: Vec<LayerSummary>,
}

/// The balance of the load of one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerSummary {
    /// See [`LayerLoad::layer`].
    pub layer: String,
    /// See [`LayerLoad::min`].
    #[serde(with = "json_float")]
    pub min: f64,
    /// See [`LayerLoad::max`].
    #[serde(with = "json_float")]
    pub max: f64,
    /// See [`LayerLoad::entropy`].
    #[serde(with = "json_float")]
    pub entropy: f64,
    /// See [`LayerLoad::dropped_fraction`].
    #[serde(with = "json_float")]
    pub dropped: f64,
    /// See [`LayerLoad::losses`]; absent without losses.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        with = "json_float::map"
    )]
    pub losses: BTreeMap<RouterLossKind, f64>,
}

/// Load of each expert in the step before an evaluation: `"kind": "expert_load"` in a metrics file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// The step, from 1.
    pub step: usize,
    /// The layers with experts.
    pub layers: Vec<LayerCounts>,
}

/// The load of each expert of one layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerCounts {
    /// See [`LayerLoad::layer`].
    pub layer: String,
    /// See [`LayerLoad::load`].
    pub load: Vec<u64>,
}

impl ExpertSummary {
    /// Returns a table with a row per layer and a column per kind of loss.
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
