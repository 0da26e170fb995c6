//! Tests `verify` with the settings of a run. The settings are applied, make no difference, and do not hide faults.

use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Device};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{
    DataParallelConfig, DataParallelError, DistributedDataParallel, Moments, Precision,
};
use burn_megatron::nn::{BuildError, ParallelModule};
use burn_megatron::pipeline::split::LayerSplit;
use burn_megatron_data::Samples;
use burn_megatron_models::Transformer;
use burn_megatron_tests::TransformerSubject;
use burn_megatron_tests::tampered::Tampered;
use burn_megatron_tests::{small_gpt, small_llama};
use burn_megatron_verify::faults::corrupted::{CorruptedComm, Corruption};
use burn_megatron_verify::{Layout, Rounding, Subject, VerifyOptions, VerifyReport, verify};

/// A transformer that records how it is wrapped and split. Its reductions over the data axis can be corrupted.
struct RecordingSubject {
    inner: TransformerSubject,
    corruption: Option<Corruption>,
    /// The settings of each wrapper of several ranks, and its number of buckets.
    wrapped: Mutex<Vec<(DataParallelConfig, usize)>>,
    /// The parameters of the pipelines with their stages.
    built: Mutex<Vec<(usize, String)>>,
}

impl RecordingSubject {
    fn new(inner: TransformerSubject) -> Self {
        Self {
            inner,
            corruption: None,
            wrapped: Mutex::default(),
            built: Mutex::default(),
        }
    }

    fn corrupted(inner: TransformerSubject, how: Corruption) -> Self {
        Self {
            corruption: Some(how),
            ..Self::new(inner)
        }
    }
}

impl Subject for RecordingSubject {
    type Model = Transformer;

    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<Transformer>, BuildError> {
        let model = self.inner.build(groups, device)?;
        if groups.pipeline().size() > 1 {
            let entries = model.table.entries().iter();
            let built = entries.map(|entry| (entry.stage, entry.path.clone()));
            self.built.lock().unwrap().extend(built);
        }
        Ok(model)
    }

    fn wrap(
        &self,
        model: ParallelModule<Transformer>,
        groups: &ParallelContext,
        config: &DataParallelConfig,
    ) -> Result<DistributedDataParallel<Transformer>, DataParallelError> {
        let mut groups = groups.clone();
        if let Some(how) = self.corruption {
            groups = groups
                .clone()
                .with_data(CorruptedComm::wrap(groups.data(), how));
        }
        let ddp = DistributedDataParallel::with(model, &groups, config)?;
        if groups.world().size() > 1 {
            let buckets = ddp.layout().bucket_count();
            self.wrapped.lock().unwrap().push((config.clone(), buckets));
        }
        Ok(ddp)
    }

    fn dtype(&self) -> DType {
        self.inner.dtype()
    }

    fn rounding(&self, layout: &Layout) -> Option<Rounding> {
        self.inner.rounding(layout)
    }

    fn samples(&self) -> usize {
        self.inner.samples()
    }

    fn data(&self, groups: &ParallelContext) -> Arc<dyn Samples> {
        self.inner.data(groups)
    }

    fn layers(&self) -> usize {
        self.inner.layers()
    }
}

fn sharing(change: impl FnOnce(&mut DataParallelConfig)) -> VerifyOptions {
    let mut options = VerifyOptions {
        steps: 2,
        ..VerifyOptions::default()
    };
    change(&mut options.train.data_parallel);
    options
}

#[track_caller]
fn run(subject: &impl Subject, layouts: &[&str], options: &VerifyOptions) -> VerifyReport {
    let layouts: Vec<Layout> = layouts.iter().map(|name| name.parse().unwrap()).collect();
    verify(subject, &layouts, options).unwrap()
}

#[test]
fn the_settings_reach_what_runs_and_make_no_difference() {
    type Change = fn(&mut DataParallelConfig);
    let settings: [(&[&str], Change); 4] = [
        (&["dp2-mb1-z1"], |config| config.overlap_param_gather = true),
        (&["dp2-mb1-z3"], |config| config.keep_gathered = true),
        (&["dp2-mb1", "tp2-dp2-z2"], |config| {
            config.bucket_size = Some(300);
        }),
        (&["dp2-mb1"], |config| config.overlap_grad_reduce = false),
    ];
    for (layouts, change) in settings {
        let subject = RecordingSubject::new(small_gpt());
        let report = run(&subject, layouts, &sharing(change));
        assert!(report.passes(), "{report}");
        for (found, buckets) in subject.wrapped.into_inner().unwrap() {
            let mut expected = found.clone();
            change(&mut expected);
            assert_eq!(found, expected);
            if let Some(size) = found.bucket_size.filter(|size| *size < 5000) {
                assert!(buckets > 8, "{buckets} buckets of {size}");
            }
        }
    }
}

/// The fault has an effect only with several buckets.
#[test]
fn buckets_after_the_first_that_are_not_summed() {
    let subject = RecordingSubject::corrupted(small_gpt(), Corruption::SkipAfterFirst);
    let buckets_of = |size| VerifyOptions {
        steps: 1,
        ..sharing(|config| config.bucket_size = Some(size))
    };
    let report = run(&subject, &["dp2-mb1"], &buckets_of(1_000_000));
    assert!(report.passes(), "{report}");
    let report = run(&subject, &["dp2-mb1"], &buckets_of(300));
    let (_, comparison) = &report.rows()[0];
    assert!(
        comparison.failing(1e-10).contains(&"parameter grad"),
        "{report}"
    );
}

/// A setting without effect is not ignored.
#[test]
fn a_schedule_without_a_pipeline_is_an_error() {
    for (layout, name) in [
        ("dp2-mb1/zb-h1", "schedule"),
        ("dp2-mb1/v2", "virtual_stages"),
    ] {
        let layouts = [layout.parse().unwrap()];
        let error = verify(&small_gpt(), &layouts, &VerifyOptions::default());
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with("layout tp1-dp2-mb1"), "{error}");
        let expected = format!("{name} requires pipeline parallelism, but pipeline = 1");
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn stages_hold_the_layers_that_the_split_gives_them() {
    let split = LayerSplit::Layout("Et*3|t,L".into());
    let mut inner = small_gpt();
    inner.config.layers = 4;
    let subject = RecordingSubject::new(inner);
    let mut layout: Layout = "pp2-mb1/1f1b".parse().unwrap();
    layout.parallel.split = split.clone();
    layout.parallel.defer_embedding_wgrad = Some(1);
    let report = verify(&subject, &[layout], &sharing(|_| ())).unwrap();
    assert!(report.passes(), "{report}");
    let expected = split.stages(4, 2).unwrap();
    let mut seen = [0; 4];
    for (stage, path) in subject.built.into_inner().unwrap() {
        let Some(rest) = path.strip_prefix("blocks.") else {
            continue;
        };
        let layer = rest.split('.').next().unwrap().parse().unwrap();
        assert!(expected[stage].layers.contains(&layer), "{path}");
        seen[layer] += 1;
    }
    assert!(seen.iter().all(|parameters| *parameters > 0), "{seen:?}");
}

/// Deferred gradients need the weight that the model names.
#[test]
fn deferring_without_an_output_weight_is_an_error() {
    let renamed = Tampered::table(small_gpt(), |entry| {
        entry.path = entry.path.replace("embedding", "vocabulary");
    });
    let mut layout: Layout = "pp2-mb1/1f1b".parse().unwrap();
    layout.parallel.defer_embedding_wgrad = Some(0);
    let error = verify(&renamed, &[layout], &sharing(|_| ())).unwrap_err();
    let error = error.to_string();
    let expected = "the last stage has no parameter embedding.weight";
    assert!(error.contains(expected), "{error}");
}

/// A training run skips such steps. Here the step causes an error that names the setting.
#[test]
fn a_limit_that_a_gradient_is_beyond_is_an_error() {
    let options = sharing(|config| config.gradient_limit = Some(1e-9));
    let layouts = ["dp2-mb1".parse().unwrap()];
    let error = verify(&small_gpt(), &layouts, &options).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("gradient_limit = 0.000000001 would skip step 1"),
        "{error}"
    );
}

const LAYOUTS: [&str; 5] = [
    "dp2-mb1",
    "dp2-z3",
    "tp2-sp",
    "pp2-mb1/zb-h1",
    "tp2-sp-pp2-dp2-mb1-z1/1f1b",
];

/// Narrower types are within the tolerance of the type, and far from a skipped reduction.
#[test]
fn layouts_agree_in_f32_and_bf16_within_the_type() {
    for (dtype, highest) in [(DType::F32, 1e-4), (DType::BF16, 0.1)] {
        for inner in [small_gpt(), small_llama()] {
            let inner = TransformerSubject { dtype, ..inner };
            let report = run(&inner, &LAYOUTS, &sharing(|_| ()));
            assert!(report.passes(), "{dtype:?}\n{report}");
            println!("{report}");
            assert!(report.bounds().all(|bound| bound < highest), "{report}");
            let faulty = RecordingSubject::corrupted(inner, Corruption::Skip);
            let report = run(&faulty, &["dp2-mb1"], &sharing(|_| ()));
            let bound = report.bounds().next().unwrap();
            let failing = report.rows()[0].1.failing(bound);
            assert!(failing.contains(&"parameter grad"), "{dtype:?}\n{report}");
        }
    }
}

#[test]
fn sums_and_moments_in_16_bits() {
    let inner = TransformerSubject {
        dtype: DType::BF16,
        ..small_llama()
    };
    let subject = RecordingSubject::new(inner);
    let options = sharing(|config| {
        config.reduce_in_16_bits = true;
        config.moments = Moments::Bf16;
    });
    let report = run(&subject, &["dp2-mb1-z1", "tp2-dp2-z3"], &options);
    assert!(report.passes(), "{report}");
    for (config, _) in subject.wrapped.into_inner().unwrap() {
        assert_eq!(config.precision, Precision::Bf16);
        assert!(config.reduce_in_16_bits && config.moments == Moments::Bf16);
    }
}
