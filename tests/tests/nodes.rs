//! Tests `verify` of gradients that are summed hierarchically by node, and of sums that end within their node.

use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron_models::TransformerConfig;
use burn_megatron_tests::tampered::Tampered;
use burn_megatron_train::TrainConfig;
use burn_megatron_verify::faults::corrupted::{CorruptedComm, Corruption};
use burn_megatron_verify::{ModelSubject, Subject, VerifyOptions, VerifyReport, verify};

fn report(subject: &impl Subject) -> VerifyReport {
    let options = VerifyOptions {
        train: TrainConfig {
            data_parallel: DataParallelConfig {
                hierarchical_reduce: true,
                bucket_size: Some(300),
                ..DataParallelConfig::default()
            },
            ..VerifyOptions::default().train
        },
        ..VerifyOptions::default()
    };
    let layouts = ["dp4-mb1-node2"].map(|layout| layout.parse().unwrap());
    verify(subject, &layouts, &options).unwrap()
}

fn subject() -> ModelSubject<TransformerConfig> {
    ModelSubject {
        samples: 4,
        ..ModelSubject::new(burn_megatron_tests::small_llama().config)
    }
}

#[test]
fn sums_that_end_in_their_node_are_found() {
    let sound = report(&subject());
    assert!(sound.passes(), "{sound}");
    let faulty = Tampered::groups(subject(), |groups: &ParallelContext| {
        let data = CorruptedComm::wrap(groups.data(), Corruption::SkipInSubgroups);
        groups.clone().with_data(data)
    });
    let report = report(&faulty);
    let failing = report.rows()[0]
        .1
        .failing(VerifyOptions::default().tolerance);
    assert!(failing.contains(&"parameter grad"), "{report}");
}
