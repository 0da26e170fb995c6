//! Tests `verify` of experts. Every pair of values of the settings below occurs in some row.

use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::moe::{
    Capacity, DispatcherKind, ExpertGroups, Fp8DispatchScales, GroupScore, KeepPolicy,
    RouterChoice, RouterLoss, RouterLossKind, ScoreFunction,
};
use burn_megatron_models::{MoeConfig, Positions, TransformerConfig};
use burn_megatron_tests::pairwise::{Row, Settings, describe, pairwise, product, value};
use burn_megatron_verify::{Layout, ModelSubject, VerifyOptions, verify};

/// The name and the values of each setting.
const SETTINGS: Settings<13> = [
    ("expert", &["1", "2", "4"]),
    ("tensor", &["1", "2", "2 with the same tokens"]),
    ("expert_tensor", &["1", "2"]),
    ("expert data", &["1", "2"]),
    ("pipeline", &["1", "2"]),
    ("zero", &["0", "1", "2", "3"]),
    (
        "router",
        &[
            "softmax",
            "pre-softmax",
            "sigmoid",
            "sqrt-softplus",
            "groups",
            "bias",
            "sinkhorn",
            "jitter",
        ],
    ),
    (
        "loss",
        &["none", "balance", "sequence", "global", "z", "several"],
    ),
    ("capacity", &["none", "largest", "first", "padded"]),
    ("shared", &["none", "shared", "gated"]),
    ("tied", &["yes", "no"]),
    (
        "dispatcher",
        &["all-to-all", "all-gather", "flex", "flex over nodes of 2"],
    ),
    // The only recipe whose scales do not depend on the rows of an expert, and tokens that are sent in FP8.
    ("fp8", &["none", "delayed", "dispatch f32", "dispatch e8m0"]),
];

/// A row with access to its values by name.
pub struct Case(Row<13>);

impl Case {
    fn value(&self, setting: &str) -> &'static str {
        value(&SETTINGS, &self.0, setting)
    }

    fn size(&self, setting: &str) -> usize {
        let number = self.value(setting).split(' ').next();
        number.unwrap().parse().unwrap()
    }

    /// Returns the number of data ranks of the dense grid, or `None` if it is not an integer.
    fn data(&self) -> Option<usize> {
        let ranks = ["expert", "expert_tensor", "expert data"].map(|axis| self.size(axis));
        let (ranks, tensor) = (ranks.into_iter().product::<usize>(), self.size("tensor"));
        ranks.is_multiple_of(tensor).then(|| ranks / tensor)
    }

    fn is_valid(&self) -> bool {
        let Some(data) = self.data() else {
            return false;
        };
        let sinkhorn = self.value("router") == "sinkhorn";
        let balanced = !["none", "z"].contains(&self.value("loss"));
        let drops = self.value("capacity") != "none";
        let padded = self.value("capacity") == "padded";
        let is_global = self.value("loss") == "global";
        let ranks = self.size("expert") * self.size("expert_tensor");
        [
            // More ranks than samples, or nothing to shard.
            data > SAMPLES || data == 1 && self.value("zero") != "0",
            sinkhorn && (balanced || drops),
            padded && self.value("dispatcher") != "all-to-all",
            self.fp8_dispatch().is_some() && !self.is_flex(),
            // A node has several ranks, and there are several nodes.
            self.value("dispatcher").ends_with("2") && (ranks < 4 || !ranks.is_multiple_of(2)),
            // A rank drops tokens separately, so one rank drops the same tokens only if it has the same tokens at
            // once.
            drops && self.size("tensor") > 1,
            // The loss uses all micro-batches of the step at once, so each rank has one micro-batch. Tokens are
            // dropped per micro-batch.
            is_global && drops,
        ]
        .iter()
        .all(|refused| !refused)
    }

    fn fp8_dispatch(&self) -> Option<Fp8DispatchScales> {
        match self.value("fp8") {
            "dispatch f32" => Some(Fp8DispatchScales::F32),
            "dispatch e8m0" => Some(Fp8DispatchScales::E8m0),
            _ => None,
        }
    }

    /// Returns whether samples have several documents and padding. This is the case in half of the rows. Equal tokens
    /// at the starts of documents have weights that differ only by rounding, so a capacity could keep any of them.
    fn is_packed(&self) -> bool {
        self.value("tied") == "no" && self.value("capacity") == "none"
    }

    fn is_flex(&self) -> bool {
        self.value("dispatcher").starts_with("flex")
    }

    pub fn layout(&self) -> Layout {
        let data = self.data().unwrap();
        let tensor = self.size("tensor");
        let mut parallel = ParallelConfig::new()
            .with_expert(self.size("expert"))
            .with_expert_tensor(self.size("expert_tensor"))
            .with_tensor(tensor)
            .with_sequence_parallel(self.value("tensor") == "2")
            .with_pipeline(self.size("pipeline"))
            .with_data(data);
        parallel.zero_stage = self.value("zero").parse().unwrap();
        parallel.ranks_per_node = self.value("dispatcher").ends_with("2").then_some(2);
        let share = SAMPLES / data;
        let parts = if self.value("loss") == "global" { 1 } else { 2 };
        Layout {
            parallel,
            micro_batch: Some((share / parts).max(1)),
        }
    }

    pub fn config(&self) -> TransformerConfig {
        let mut moe = MoeConfig {
            experts: 4,
            expert_width: Some(8),
            shared_width: (self.value("shared") != "none").then_some(8),
            shared_gate: self.value("shared") == "gated",
            dispatcher: match self.value("dispatcher") {
                "all-to-all" => DispatcherKind::AllToAll,
                "all-gather" => DispatcherKind::AllGather,
                _ => DispatcherKind::Flex,
            },
            fp8_dispatch: self.fp8_dispatch(),
            ..MoeConfig::default()
        };
        match self.value("router") {
            "softmax" => {}
            "pre-softmax" => moe.score = ScoreFunction::PreSoftmax,
            "sigmoid" => moe.score = ScoreFunction::Sigmoid,
            "sqrt-softplus" => moe.score = ScoreFunction::SqrtSoftplus,
            "groups" => {
                moe.score = ScoreFunction::Sigmoid;
                moe.factor = 2.5;
                moe.groups = Some(ExpertGroups {
                    groups: 2,
                    chosen: 1,
                    score: GroupScore::SumOf(2),
                });
            }
            "bias" => {
                moe.score = ScoreFunction::Sigmoid;
                moe.bias_update_rate = Some(0.05);
            }
            "sinkhorn" => {
                moe.score = ScoreFunction::PreSoftmax;
                moe.choice = RouterChoice::Sinkhorn;
            }
            "jitter" => moe.jitter = 0.1,
            other => panic!("{other}"),
        }
        use RouterLossKind::{Balance, GlobalBalance, SequenceBalance, ZLoss};
        let kinds: &[_] = match self.value("loss") {
            "none" => &[],
            "balance" => &[Balance],
            "sequence" => &[SequenceBalance],
            "global" => &[GlobalBalance],
            "z" => &[ZLoss],
            _ => &[Balance, SequenceBalance, ZLoss],
        };
        let loss = |kind: &RouterLossKind| RouterLoss {
            kind: *kind,
            coefficient: 0.05,
        };
        moe.losses = kinds.iter().map(loss).collect();
        let keep = match self.value("capacity") {
            "none" => None,
            "first" => Some(KeepPolicy::First),
            _ => Some(KeepPolicy::LargestWeights),
        };
        moe.capacity = keep.map(|keep| Capacity {
            factor: 1.0,
            keep,
            pad: self.value("capacity") == "padded",
        });
        TransformerConfig {
            vocabulary: 19,
            context: 8,
            hidden: 16,
            layers: 2,
            mlp_width: Some(12),
            init_std: 0.2,
            // Without learned positions, a token that is repeated at the start of a sequence has equal weights up to
            // rounding. A capacity could keep any of these tokens.
            positions: Positions::Learned,
            tied: self.value("tied") == "yes",
            moe: Some(moe),
            ..TransformerConfig::mixtral()
        }
    }

    fn check(&self) {
        let what = describe(&SETTINGS, &self.0);
        let subject = ModelSubject {
            samples: SAMPLES,
            packed: self.is_packed(),
            fp8: Fp8Config {
                recipe: self.value("fp8").parse().ok(),
                ..Fp8Config::default()
            },
            ..ModelSubject::new(self.config())
        };
        let options = VerifyOptions::default();
        let report = verify(&subject, &[self.layout()], &options).unwrap();
        assert!(report.passes(), "{what}\n{report}");
        assert!(report.bounds().all(|bound| bound == options.tolerance));
    }
}

const SAMPLES: usize = 8;

fn rows() -> Vec<Row<13>> {
    product(&SETTINGS, |row| Case(*row).is_valid())
}

#[test]
#[ignore = "slow: run by the nightly workflow, next to fuzz-layouts"]
fn every_pair_of_settings() {
    let all = rows();
    let chosen = pairwise(&SETTINGS, &all);
    println!("{} of {} rows", chosen.len(), all.len());
    for row in chosen {
        Case(row).check();
    }
}

/// Tests all layouts of one model, then all models in one layout. It takes half an hour.
#[test]
#[ignore = "run by hand, with --ignored"]
fn full_product() {
    // The settings expert, tensor, expert_tensor, expert data, pipeline, zero.
    const LAYOUT: usize = 6;
    let [model, layout] = [
        case(&[("router", "bias"), ("loss", "several"), ("shared", "gated")]),
        case(&[
            ("expert", "2"),
            ("expert data", "2"),
            ("pipeline", "2"),
            ("zero", "1"),
        ]),
    ];
    let mut rows = rows();
    rows.retain(|row| row[LAYOUT..] == model.0[LAYOUT..] || row[..LAYOUT] == layout.0[..LAYOUT]);
    // FP8 is covered by the pairs.
    rows.retain(|row| Case(*row).value("fp8") == "none");
    println!("{} rows", rows.len());
    for row in rows {
        Case(row).check();
    }
}

/// Returns the case with the given values. All other settings have their first value.
pub fn case(values: &[(&str, &str)]) -> Case {
    let mut row = [0; SETTINGS.len()];
    for (setting, value) in values {
        let index = SETTINGS
            .iter()
            .position(|(name, _)| name == setting)
            .unwrap();
        let values = SETTINGS[index].1.iter();
        row[index] = values.clone().position(|known| known == value).unwrap();
    }
    Case(row)
}
