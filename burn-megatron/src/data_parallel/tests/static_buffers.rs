//! Tests of static buffers, and of micro-batches that are counted like micro-batches that replay a graph. The results
//! must be bitwise equal.

use super::*;
use crate::optim::{AdamWConfig, ParallelAdamW};

/// Returns the weights after three steps of two micro-batches. With static buffers the second micro-batch is
/// counted as if it was replayed.
fn weights(groups: &ParallelContext, config: &DataParallelConfig) -> Result<Vec<u32>, RankError> {
    let model = ParallelModule::replicated(pair(0.7, &Device::flex()));
    let mut ddp = DistributedDataParallel::with(model, groups, config)?;
    let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
    for step in 0..3 {
        let micro_batch = |number: usize| {
            let own = (1 + groups.rank() + 3 * number + step) as f64;
            let loss = ddp.forward(&device(), |pair| {
                let second = pair.second.val().powf_scalar(2.0).sum();
                pair.first.val().sum().mul_scalar(own) + second.mul_scalar(own / 3.0)
            });
            ddp.backward(loss);
        };
        if config.static_buffers {
            ddp.hold_reductions();
            micro_batch(0);
            ddp.release_reductions(false);
            ddp.hold_reductions();
            let ((), uses) = ddp.capture_micro_batch(|| micro_batch(1));
            ddp.count_micro_batch(&uses);
            ddp.release_reductions(true);
        } else {
            micro_batch(0);
            micro_batch(1);
        }
        let gradients = ddp.reduce(2)?;
        optimizer.step(0.01, &mut ddp, gradients);
    }
    let (peak, planned) = (ddp.usage().peak(), ddp.memory_plan()?);
    assert!(
        !config.static_buffers || peak.total() <= planned.total(),
        "{peak:?} of {planned:?}"
    );
    ddp.check_replicas()?;
    let parameters = ddp.parameters().into_iter().flat_map(values);
    Ok(parameters.map(f32::to_bits).collect())
}

#[test]
fn they_change_no_bits() {
    for ranks in [1, 2] {
        for zero_stage in [
            ZeroStage::Replicated,
            ZeroStage::Optimizer,
            ZeroStage::Gradients,
        ] {
            for precision in [Precision::F32, Precision::Bf16] {
                let [plain, fixed] = [false, true].map(|static_buffers| {
                    let config = DataParallelConfig {
                        zero_stage,
                        precision,
                        static_buffers,
                        bucket_size: Some(6),
                        ..DataParallelConfig::default()
                    };
                    over(1, ranks, |groups| weights(groups, &config)).unwrap()
                });
                assert!(plain[0][0] != 0.7f32.to_bits());
                assert_eq!(plain, fixed, "{ranks} ranks, {zero_stage}, {precision:?}");
            }
        }
    }
}
