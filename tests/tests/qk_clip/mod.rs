//! Tests of QK-Clip. The largest logits and the clipped weights are computed by hand and must be the same in every
//! layout.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{OffloadConfig, Precision};
use burn_megatron::kernel_selection::{KernelChoice, KernelChoices};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::{ModelBuilder, QkNorm};
use burn_megatron::optim::{AdamWConfig, MuonConfig, OptimizerConfig, QkClipConfig};
use burn_megatron_data::{DataError, Sample, Samples};
use burn_megatron_models::{MlaConfig, TransformerConfig};
use burn_megatron_tests::TransformerSubject;
use burn_megatron_tests::overflows::{assert_overflows, overflowing, train};
use burn_megatron_tests::tampered::Tampered;
use burn_megatron_tests::tolerance::{assert_all_near, assert_near};
use burn_megatron_tests::{Text, small_gpt, small_gpt_oss, small_llama, without_dropout};
use burn_megatron_train::metrics::StepMetrics;
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};
use burn_megatron_verify::faults::corrupted::{CorruptedComm, Corruption};
use burn_megatron_verify::{Layout, Subject, VerifyOptions, VerifyReport, verify};

use super::resume::run::{Case, Folder, assert_same};

mod by_hand;

use by_hand::ByHand;

const CLIP: QkClipConfig = QkClipConfig {
    threshold: 1e-3,
    alpha: 0.3,
};

/// Returns a model with latent attention, whose heads share the key with a position.
fn small_deepseek() -> TransformerSubject {
    let llama = small_llama();
    let config = TransformerConfig {
        groups: None,
        mla: Some(MlaConfig {
            q_rank: Some(12),
            kv_rank: 8,
            nope_width: 4,
            rope_width: 4,
            value_width: 6,
            norm_epsilon: 1e-6,
        }),
        ..llama.config
    };
    TransformerSubject { config, ..llama }
}

/// Repeats a few samples.
struct Again {
    samples: Arc<dyn Samples>,
    count: u64,
}

impl Samples for Again {
    fn seq(&self) -> usize {
        self.samples.seq()
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        self.samples.sample(number % self.count)
    }
}

/// Returns a configuration with two micro-batches of two samples in f64.
fn config(qk_clip: Option<QkClipConfig>) -> TrainConfig {
    let mut config = TrainConfig {
        steps: 2,
        micro_batch_size: 2,
        global_batch_size: 4,
        warmup_steps: 0,
        learning_rate: 1e-2,
        log_max_attention_logit: true,
        qk_clip,
        ..TrainConfig::default()
    };
    config.data_parallel.precision = Precision::F64;
    config
}

/// The metrics of each step, and the parameters before the first step and after each step.
struct Steps {
    metrics: Vec<StepMetrics>,
    parameters: Vec<Vec<Vec<f64>>>,
    paths: Vec<String>,
}

fn values(tensor: Tensor<1>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

fn run(
    model: &TransformerConfig,
    kernels: KernelChoice,
    config: &TrainConfig,
    samples: &dyn Samples,
) -> Steps {
    let (groups, device) = (ParallelContext::single(), Device::flex());
    let scope = ModelBuilder::with(&groups, &device, 1, DType::F64);
    let scope = scope.with_kernels(&KernelChoices::all(kernels)).unwrap();
    let model = model.init_with(scope).unwrap();
    let mut trainer = Trainer::new(model, &groups, &device, config).unwrap();
    let parameters = |trainer: &Trainer<_>| -> Vec<Vec<f64>> {
        let all = trainer.model().parameters().into_iter();
        all.map(values).collect()
    };
    let entries = trainer.model().table().entries().iter();
    let mut steps = Steps {
        metrics: vec![],
        paths: entries.map(|entry| entry.path.clone()).collect(),
        parameters: vec![parameters(&trainer)],
    };
    for _ in 0..config.steps {
        let metrics = trainer.step(samples, &mut NoopObserver).unwrap();
        assert!(!metrics.skipped);
        steps.metrics.push(metrics);
        steps.parameters.push(parameters(&trainer));
    }
    steps
}

fn samples(model: &TransformerConfig) -> Arc<dyn Samples> {
    TransformerSubject {
        config: model.clone(),
        ..small_gpt()
    }
    .data(&ParallelContext::single())
}

#[test]
fn logits_and_weights_are_those_of_loops() {
    let model = TransformerConfig {
        layers: 1,
        groups: Some(2),
        ..without_dropout(small_gpt()).config
    };
    let samples = samples(&model);
    for kernels in [KernelChoice::Fused, KernelChoice::Unfused] {
        let plain = run(&model, kernels, &config(None), &*samples);
        let by_hand = |at| ByHand {
            steps: &plain,
            at,
            model: &model,
        };
        let mut of_groups = [0.0; 2];
        for step in [1, 0] {
            let batch = samples.batch(4 * step as u64..4 * step as u64 + 4).unwrap();
            let largest = by_hand(step).largest(&batch);
            let most = largest.iter().copied().fold(f64::MIN, f64::max);
            let found = plain.metrics[step].max_attention_logit.unwrap();
            assert_near("the largest logit", found, most, 1e-12);
            of_groups = [0, 1].map(|group| largest[2 * group].max(largest[2 * group + 1]));
        }
        // One of the two groups is clipped.
        let clip = QkClipConfig {
            threshold: (of_groups[0] + of_groups[1]) / 2.0,
            alpha: 0.3,
        };
        let clipped = run(&model, kernels, &config(Some(clip)), &*samples);
        let width = model.hidden / model.heads;
        let factor = |column: usize| {
            let (unit, share) = (column / width, [clip.alpha, 1.0 - clip.alpha]);
            let (group, exponent) = match unit {
                0..4 => (unit / 2, share[0]),
                4..6 => (unit - 4, share[1]),
                _ => return 1.0,
            };
            (clip.threshold / of_groups[group]).min(1.0).powf(exponent)
        };
        for (index, path) in plain.paths.iter().enumerate() {
            let (before, found) = (&plain.parameters[1][index], &clipped.parameters[1][index]);
            let columns = 8 * width;
            let factors = (0..before.len()).map(|at| match path.contains("qkv") {
                true => factor(at % columns),
                false => 1.0,
            });
            let factors: Vec<_> = factors.collect();
            let expected: Vec<_> = before.iter().zip(&factors).map(|(x, f)| x * f).collect();
            assert_all_near(path, found, &expected, 1e-13);
            for (at, factor) in factors.iter().enumerate() {
                assert!(*factor != 1.0 || found[at] == before[at], "{path} {at}");
            }
        }
        let changed = plain.parameters[1] != clipped.parameters[1];
        assert!(changed, "one group is above the threshold");
    }
}

/// After the clip, the largest logit of the same samples is the threshold. Nothing else changes the weights.
#[test]
fn the_largest_logit_becomes_the_threshold() {
    let models = [
        without_dropout(small_gpt()).config,
        TransformerConfig {
            attention_soft_cap: Some(0.01),
            ..without_dropout(small_llama()).config
        },
        without_dropout(small_deepseek()).config,
    ];
    for model in models {
        let model = TransformerConfig { layers: 1, ..model };
        let samples = Again {
            samples: samples(&model),
            count: 4,
        };
        for kernels in [KernelChoice::Auto, KernelChoice::Unfused] {
            let still = |qk_clip| TrainConfig {
                learning_rate: 1e-200,
                min_learning_rate: 0.0,
                ..config(qk_clip)
            };
            let plain = run(&model, kernels, &still(None), &samples);
            let largest = plain.metrics[0].max_attention_logit.unwrap();
            assert_eq!(plain.metrics[1].max_attention_logit, Some(largest));
            let clip = QkClipConfig {
                threshold: 0.4 * largest,
                alpha: 0.7,
            };
            let clipped = run(&model, kernels, &still(Some(clip)), &samples);
            let after = clipped.metrics[1].max_attention_logit.unwrap();
            assert_near("the largest logit", after, clip.threshold, 1e-12);
        }
    }
}

fn report(
    subject: &TransformerSubject,
    layouts: &[Layout],
    options: &VerifyOptions,
) -> VerifyReport {
    let report = verify(subject, layouts, options).unwrap();
    println!("{report}");
    report
}

fn options(optimizer: OptimizerConfig) -> VerifyOptions {
    VerifyOptions {
        train: TrainConfig {
            optimizer,
            qk_clip: Some(CLIP),
            ..VerifyOptions::default().train
        },
        ..VerifyOptions::default()
    }
}

fn layouts(names: &[&str]) -> Vec<Layout> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

#[test]
fn a_layout_clips_as_one_rank() {
    let muon = || options(OptimizerConfig::Muon(MuonConfig::default()));
    let adamw = || options(AdamWConfig::default().into());
    let mut one_group = without_dropout(small_llama());
    one_group.config.groups = Some(1);
    one_group.samples = 12;
    let context = [
        "cp2-ring-dp1",
        "tp2-sp-cp2-alltoall-dp1-mb2",
        "cp4-usp2-dp1-mb2",
        "cp2-allgather-dp2-mb1-z3",
    ];
    let of_scores = ["tp2-sp-cp2-alltoall-dp1-mb2", "cp2-allgather-dp2-mb1-z3"];
    let of_groups = ["tp4-dp3-mb1-z2", "dp3-mb2-z3", "tp2-pp2-dp2-mb2-z3/1f1b"];
    let unfused = TransformerSubject {
        kernels: KernelChoices::all(KernelChoice::Unfused),
        ..small_llama()
    };
    let packed = TransformerSubject {
        packed: true,
        ..small_llama()
    };
    for (subject, layouts, options) in [
        (small_llama(), Layout::standard(), muon()),
        // Unfused, with biases.
        (small_gpt(), Layout::standard(), adamw()),
        (
            small_gpt_oss(),
            layouts(&["tp2-sp-ep2-dp2-mb2-z1"]),
            adamw(),
        ),
        (one_group, layouts(&of_groups), muon()),
        (
            small_deepseek(),
            layouts(&["tp4-sp-dp1", "dp4-mb1-z2"]),
            muon(),
        ),
        (
            small_deepseek(),
            layouts(&["tp2-cp2-dp1", "pp2-mb1/zb-h1"]),
            adamw(),
        ),
        (small_llama(), layouts(&context), adamw()),
        (unfused, layouts(&of_scores), adamw()),
        (packed, layouts(&["tp2-dp2-mb1", "cp2-ring-dp1"]), adamw()),
    ] {
        let report = report(&subject, &layouts, &options);
        assert!(report.passes(), "{report}");
    }
}

/// Buckets on the host are clipped there.
#[test]
fn state_on_the_host_is_clipped_to_the_same_bits() {
    let mut case = Case::llama("tp2-dp2-mb3-z2");
    case.train.qk_clip = Some(CLIP);
    let on_device = case.run(None, 3, None);
    case.train.data_parallel.offload = OffloadConfig { optimizer: 0.6 };
    let on_host = case.run(None, 3, None);
    for (host, device) in on_host.iter().zip(&on_device) {
        assert_eq!(host.steps, device.steps);
        assert!(host.weights == device.weights);
    }
}

#[test]
fn a_maximum_that_is_not_reduced_is_found() {
    let own = |subject| {
        Tampered::groups(subject, |groups| {
            let world = CorruptedComm::wrap(groups.world(), Corruption::OwnMax);
            groups.clone().with_world(world)
        })
    };
    for layout in ["tp1-dp2", "cp2-ring-dp1", "tp4-dp1"] {
        let layouts = layouts(&[layout]);
        // Four ranks share one key.
        let mut subject = without_dropout(small_llama());
        subject.config.groups = Some(1);
        let options = options(AdamWConfig::default().into());
        assert!(report(&subject, &layouts, &options).passes());
        let report = verify(&own(subject), &layouts, &options).unwrap();
        println!("{report}");
        let (_, found) = &report.rows()[0];
        assert!(found.failing(1e-10).contains(&"final weights"), "{report}");
    }
}

#[test]
fn heads_below_the_threshold_keep_their_bits() {
    let mut case = Case::llama("tp2-dp2-mb3-z3");
    case.train.log_max_attention_logit = true;
    let plain = case.run(None, 3, None);
    case.train.qk_clip = Some(QkClipConfig::default());
    let clipped = case.run(None, 3, None);
    case.train.qk_clip = None;
    case.train.log_max_attention_logit = false;
    let unmeasured = case.run(None, 3, None);
    for rank in 0..case.ranks() {
        assert_eq!(clipped[rank].steps, plain[rank].steps);
        assert!(clipped[rank].weights == plain[rank].weights);
        assert!(unmeasured[rank].weights == plain[rank].weights);
        let logits = |steps: &[StepMetrics]| -> Vec<_> {
            steps.iter().map(|step| step.max_attention_logit).collect()
        };
        assert!(logits(&plain[rank].steps).iter().all(Option::is_some));
        assert_eq!(logits(&unmeasured[rank].steps), [None; 3]);
    }
}

#[test]
fn a_run_goes_on_to_the_same_bits() {
    let folder = Folder::new();
    let mut case = Case::gpt("tp2-sp-pp2-dp2-mb3-z1/1f1b");
    case.train.qk_clip = Some(CLIP);
    case.train.optimizer = OptimizerConfig::Muon(MuonConfig::default());
    let [whole, half] = ["whole", "half"].map(|name| folder.join(name));
    let uninterrupted = case.run(None, 4, Some(&whole));
    case.run(None, 2, Some(&half));
    let resumed = case.run(Some(&half), 4, Some(&half));
    assert_same("resumed", &whole, &half);
    for (rank, whole) in uninterrupted.iter().enumerate() {
        assert!(resumed[rank].weights == whole.weights, "rank {rank}");
        assert_eq!(resumed[rank].steps, whole.steps[2..], "rank {rank}");
    }
}

/// A skipped step clips nothing, whether the skip is detected on the host or on the device.
#[test]
fn a_step_that_is_read_later_is_clipped_to_the_same_bits() {
    let text = Text::new();
    let mut config = overflowing(Precision::F16, 2f64.powi(40));
    config.qk_clip = Some(CLIP);
    let fp8 = Fp8Config::default();
    let run = |defers| {
        let settings = (&config, &fp8, None);
        train(
            &Device::flex(),
            "dp2-mb2-z1",
            settings,
            &text.open(),
            defers,
        )
    };
    let (at_once, later) = (run(false), run(true));
    assert_overflows(&at_once, "f16");
    assert_eq!(at_once, later);
}

#[test]
fn what_cannot_be_clipped_is_refused() {
    let refused = |model: TransformerConfig, config: &TrainConfig| {
        let (groups, device) = (ParallelContext::single(), Device::flex());
        let scope = ModelBuilder::with(&groups, &device, 1, DType::F64);
        let model = model.init_with(scope).unwrap();
        match Trainer::new(model, &groups, &device, config) {
            Ok(_) => panic!("not refused"),
            Err(error) => error.to_string(),
        }
    };
    let llama = small_llama().config;
    let normal = TransformerConfig {
        qk_norm: Some(QkNorm::Heads),
        ..llama.clone()
    };
    let clip = config(Some(CLIP));
    let error = refused(normal, &clip);
    assert!(
        error.contains("qk_clip cannot limit the logits of blocks.0.attention: "),
        "{error}"
    );
    let mut frozen = clip;
    frozen.freeze = vec!["blocks.*.attention.**".into()];
    frozen.data_parallel.freeze = frozen.freeze.clone();
    let error = refused(llama.clone(), &frozen);
    assert!(
        error.contains("no projection of queries and keys of this model is trained"),
        "{error}"
    );
    for (threshold, alpha, expected) in [
        (0.0, 0.5, "qk_clip.threshold = 0: expected above 0"),
        (1.0, 1.0, "qk_clip.alpha = 1: expected above 0 and below 1"),
    ] {
        let error = refused(
            llama.clone(),
            &config(Some(QkClipConfig { threshold, alpha })),
        );
        assert!(error.contains(expected), "{error}");
    }
}
