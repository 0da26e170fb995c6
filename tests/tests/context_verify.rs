//! Tests `verify` of context parallelism. Every pair of values of the settings below occurs in some row.

use burn_megatron::mesh::{ContextExchange, ContextSplit, ParallelConfig};
use burn_megatron::nn::moe::{RouterLoss, RouterLossKind};
use burn_megatron_models::{MlaConfig, MoeConfig, Positions, TransformerConfig};
use burn_megatron_tests::long_rope;
use burn_megatron_tests::pairwise::{Row, Settings, describe, pairwise, product, value};
use burn_megatron_verify::{Layout, ModelSubject, VerifyOptions, verify};

const SETTINGS: Settings<13> = [
    ("context", &["1", "2", "4"]),
    (
        "exchange",
        &["ring", "all-gather", "all-to-all", "hierarchical", "chosen"],
    ),
    (
        "split",
        &["zigzag", "contiguous", "striped", "zigzag-per-document"],
    ),
    ("tensor", &["1", "2", "2 with sequence parallelism"]),
    ("pipeline", &["1", "2"]),
    ("data", &["1", "2"]),
    ("zero", &["0", "1", "2", "3", "3 in groups of 2"]),
    (
        "groups",
        &["8", "2", "1", "latent", "latent without queries"],
    ),
    ("window", &["none", "3", "6", "40"]),
    ("documents", &["one", "packed"]),
    ("dropout", &["none", "residual", "attention"]),
    ("experts", &["none", "on one rank", "on two ranks"]),
    ("positions", &["rotary", "learned"]),
];

const SAMPLES: usize = 4;
const SEQ: usize = 16;

/// A row with access to its values by name.
struct Case(Row<13>);

impl Case {
    fn value(&self, setting: &str) -> &'static str {
        value(&SETTINGS, &self.0, setting)
    }

    fn size(&self, setting: &str) -> usize {
        let number = self.value(setting).split(' ').next();
        number.and_then(|number| number.parse().ok()).unwrap_or(1)
    }

    fn is_latent(&self) -> bool {
        self.value("groups").starts_with("latent")
    }

    fn is_valid(&self) -> bool {
        let (context, data) = (self.size("context"), self.size("data"));
        let exchange = self.value("exchange");
        let is_ring = ["ring", "hierarchical"].contains(&exchange);
        [
            // Settings without effect.
            context == 1 && (exchange != "chosen" || self.value("split") != "zigzag"),
            exchange == "hierarchical" && context != 4,
            context * data == 1 && self.value("zero") != "0",
            self.value("zero") == "3 in groups of 2" && context * data == 2,
            self.value("experts") == "on two ranks" && context * data == 1,
            // A ring does not store scores.
            is_ring && self.value("dropout") == "attention",
            // Latent attention does not support these settings.
            self.is_latent()
                && (self.value("window") != "none"
                    || self.value("positions") == "learned"
                    || !["chosen", "all-gather"].contains(&exchange)),
        ]
        .iter()
        .all(|refused| !refused)
    }

    fn layout(&self) -> Layout {
        let mut parallel = ParallelConfig::new()
            .with_context(self.size("context"))
            .with_tensor(self.size("tensor"))
            .with_sequence_parallel(self.value("tensor").contains("with"))
            .with_pipeline(self.size("pipeline"))
            .with_data(self.size("data"));
        if parallel.context > 1 {
            parallel.context_split = self.value("split").parse::<ContextSplit>().unwrap();
            parallel.context_exchange = self.value("exchange").parse::<ContextExchange>().ok();
        }
        if parallel.context_exchange == Some(ContextExchange::Hierarchical) {
            parallel.context_inner = Some(2);
        }
        if self.value("experts") == "on two ranks" {
            parallel.expert = 2;
        }
        parallel.zero_stage = self.value("zero")[..1].parse().unwrap();
        parallel.hsdp = (self.value("zero").len() > 1).then_some(2);
        Layout {
            parallel,
            micro_batch: Some(SAMPLES / self.size("data") / 2),
        }
    }

    fn config(&self) -> TransformerConfig {
        let dropout = |kind| {
            if self.value("dropout") == kind {
                0.2
            } else {
                0.0
            }
        };
        TransformerConfig {
            vocabulary: 19,
            context: SEQ,
            hidden: 16,
            layers: 2,
            heads: 8,
            groups: (!self.is_latent()).then(|| self.size("groups")),
            mla: self.is_latent().then(|| MlaConfig {
                q_rank: (self.value("groups") == "latent").then_some(6),
                kv_rank: 4,
                nope_width: 3,
                rope_width: 2,
                value_width: 2,
                norm_epsilon: 1e-6,
            }),
            mlp_width: Some(12),
            init_std: 0.2,
            window: self.value("window").parse().ok(),
            dropout: dropout("residual"),
            attention_dropout: dropout("attention"),
            positions: match self.value("positions") {
                "learned" => Positions::Learned,
                _ => long_rope(2, SEQ / 3),
            },
            moe: (self.value("experts") != "none").then(|| MoeConfig {
                experts: 4,
                expert_width: Some(8),
                jitter: 0.1,
                // Padding must not count in these losses.
                losses: [RouterLossKind::SequenceBalance, RouterLossKind::ZLoss]
                    .map(|kind| RouterLoss {
                        kind,
                        coefficient: 0.05,
                    })
                    .to_vec(),
                ..MoeConfig::default()
            }),
            ..TransformerConfig::mixtral()
        }
    }

    fn check(&self) {
        let subject = ModelSubject {
            samples: SAMPLES,
            packed: self.value("documents") == "packed",
            ..ModelSubject::new(self.config())
        };
        let what = describe(&SETTINGS, &self.0);
        let report = verify(&subject, &[self.layout()], &VerifyOptions::default());
        let report = report.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(report.passes(), "{what}\n{report}");
    }
}

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

/// Tests all settings of attention in one layout, then all layouts with one kind of attention. All rows would take
/// days.
#[test]
#[ignore = "run by hand, with --ignored"]
fn full_product() {
    const ATTENTION: [&str; 6] = [
        "context",
        "exchange",
        "split",
        "groups",
        "window",
        "documents",
    ];
    const LAYOUT: [&str; 6] = ["context", "exchange", "tensor", "pipeline", "data", "zero"];
    let attention = [("groups", "2"), ("window", "6"), ("documents", "packed")];
    let fixed = [(ATTENTION, &[][..]), (LAYOUT, &attention[..])];
    let mut rows = rows();
    rows.retain(|row| {
        fixed.iter().any(|(free, fixed)| {
            SETTINGS.iter().all(|(setting, values)| {
                let given = fixed.iter().find(|(name, _)| name == setting);
                let expected = given.map_or(values[0], |(_, value)| *value);
                free.contains(setting) || Case(*row).value(setting) == expected
            })
        })
    });
    println!("{} rows", rows.len());
    for row in rows {
        Case(row).check();
    }
}
