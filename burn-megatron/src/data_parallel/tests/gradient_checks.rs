//! Settings and steps that are refused, and reports of gradients and parameters.

use super::*;

/// Blocks in a list. A forward may skip some of the blocks.
#[derive(Module, Debug)]
pub(super) struct Blocks {
    pub blocks: Vec<Linear>,
}

pub(super) fn blocks(count: usize) -> Blocks {
    let linear = || LinearConfig::new(4, 4).init(&Device::flex());
    Blocks {
        blocks: (0..count).map(|_| linear()).collect(),
    }
}

pub(super) fn wrap(
    groups: &ParallelContext,
    count: usize,
    config: DataParallelConfig,
) -> Result<DistributedDataParallel<Blocks>, DataParallelError> {
    let model = ParallelModule::replicated(blocks(count));
    DistributedDataParallel::with(model, groups, &config)
}

/// Runs some blocks one after the other, and returns the sum of the output.
pub(super) fn run(ddp: &DistributedDataParallel<Blocks>, order: &[usize]) -> Tensor<1> {
    ddp.forward(&device(), |model| {
        let x = Tensor::<2>::ones([2, 4], (&device(), model.blocks[0].weight.dtype()));
        let y = order
            .iter()
            .fold(x, |x, block| model.blocks[*block].forward(x));
        y.sum()
    })
}

pub(super) fn stage(number: u8) -> DataParallelConfig {
    DataParallelConfig {
        zero_stage: ZeroStage::try_from(number).unwrap(),
        ..DataParallelConfig::default()
    }
}

#[test]
fn invalid_settings_are_refused() {
    let refused = |config: DataParallelConfig| {
        let run = |groups: &ParallelContext| Ok(wrap(groups, 1, config.clone()).map(drop)?);
        over(1, 4, run).unwrap_err().to_string()
    };
    for (config, expected) in [
        (
            DataParallelConfig {
                hsdp: Some(3),
                ..stage(1)
            },
            "invalid hsdp = 3: expected a divisor of the 4 ranks of the data axis (1, 2, 4)",
        ),
        (
            DataParallelConfig {
                hsdp: Some(2),
                ..stage(0)
            },
            "hsdp requires zero_stage = 1, 2 or 3, but zero_stage = 0; change the stage, or remove hsdp",
        ),
        (
            DataParallelConfig {
                overlap_param_gather: true,
                ..stage(3)
            },
            "overlap_param_gather requires zero_stage = 1 or 2, but zero_stage = 3",
        ),
        (
            DataParallelConfig {
                keep_gathered: true,
                ..stage(2)
            },
            "keep_gathered requires zero_stage = 3, but zero_stage = 2",
        ),
        (
            DataParallelConfig {
                bucket_size: Some(0),
                ..stage(2)
            },
            "invalid bucket_size = 0: expected a number above 0",
        ),
        (
            DataParallelConfig {
                reduce_in_16_bits: true,
                ..stage(2)
            },
            "reduce_in_16_bits requires precision = bf16 or f16, but precision = f32",
        ),
        (
            DataParallelConfig {
                gradient_limit: Some(-1.0),
                ..stage(2)
            },
            "invalid gradient_limit = -1: expected a number above 0",
        ),
    ] {
        let error = refused(config);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_rank_without_a_micro_batch_is_refused() {
    let run = |groups: &ParallelContext| {
        let mut ddp = wrap(groups, 2, stage(2))?;
        if groups.rank() == 0 {
            let loss = super::gradient_checks::run(&ddp, &[0, 1]);
            ddp.backward_last(loss);
        }
        Ok(ddp.reduce(groups.rank() as u64 ^ 1).map(drop)?)
    };
    let error = over(1, 2, run).unwrap_err().to_string();
    assert!(
        error.contains("this rank ran no micro-batch, but with zero_stage = 2"),
        "{error}"
    );
}

#[test]
fn ranks_that_use_blocks_in_different_orders_are_refused() {
    let run = |groups: &ParallelContext| {
        // The ranks have equal numbers of gathers of equal sizes, and only the order of the blocks differs.
        let mut ddp = wrap(groups, 2, stage(3))?;
        let order = [[0, 1], [1, 0]][groups.rank()];
        let loss = super::gradient_checks::run(&ddp, &order);
        ddp.backward_last(loss);
        Ok(ddp.reduce(1).map(drop)?)
    };
    let error = over(1, 2, run).unwrap_err().to_string();
    assert!(
        error.contains("used the parameters of the model in different orders"),
        "{error}"
    );
}

/// Each rank skips a different block. No rank hangs, and the sums are the sums of the other ranks.
#[test]
fn blocks_that_some_ranks_leave_out_have_zero_gradients_there() {
    for number in [0, 1] {
        let config = DataParallelConfig {
            bucket_size: Some(10),
            ..stage(number)
        };
        let gradients = |leave_out: bool| {
            let run = |groups: &ParallelContext| {
                let mut ddp = wrap(groups, 3, config.clone())?;
                ddp.update(|model| model.map(&mut ConstantWeights(0.25)));
                let order: Vec<_> = (0..3)
                    .filter(|block| !leave_out || *block != groups.rank())
                    .collect();
                let loss = super::gradient_checks::run(&ddp, &order);
                ddp.backward_last(loss);
                let reduced = ddp.reduce(1)?;
                let whole = ddp.full_gradients(&reduced).into_iter();
                Ok(whole.map(values).collect::<Vec<_>>())
            };
            over(1, 2, run).unwrap()
        };
        // All weights are 1/4 and all biases 0, so that a block maps ones to ones.
        let all = gradients(false).remove(0);
        let some = gradients(true);
        assert_eq!(some[0], some[1]);
        for (index, gradient) in some[0].iter().enumerate() {
            // One of the two ranks skips block 0, and the other skips block 1.
            let share = if index < 4 { 0.5 } else { 1.0 };
            let expected: Vec<f32> = all[index].iter().map(|g| g * share).collect();
            assert_eq!(*gradient, expected, "ZeRO-{number}, parameter {index}");
        }
    }
}

/// Sets weights to a value, and biases to zero.
pub(super) struct ConstantWeights(pub f32);

impl ModuleMapper for ConstantWeights {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let value = if D > 1 { self.0 } else { 0.0 };
        param.map(|tensor| tensor.zeros_like() + value)
    }
}

#[test]
fn a_gradient_that_is_not_finite_is_named_before_it_is_summed() {
    let run = |groups: &ParallelContext| {
        let mut ddp = wrap(groups, 3, stage(1))?;
        let factor = if groups.rank() == 1 { f64::NAN } else { 1.0 };
        let loss = ddp.forward(&device(), |model| {
            let x = Tensor::<2>::ones([2, 4], &device());
            let first = model.blocks[0].forward(x.clone()).sum();
            let second = model.blocks[1].forward(x.clone()).sum();
            first + second.mul_scalar(factor) + model.blocks[2].forward(x).sum()
        });
        ddp.backward_last(loss);
        Ok(ddp.reduce(1)?.invalid_gradients)
    };
    let found = over(1, 2, run).unwrap();
    assert!(found[0].is_empty());
    let text = found[1][0].to_string();
    assert!(
        text.starts_with("the gradient of blocks.1.") && text.ends_with("on rank 1 is not finite"),
        "{text}"
    );
}

#[test]
fn a_gradient_above_the_limit_is_named() {
    let config = DataParallelConfig {
        gradient_limit: Some(100.0),
        ..stage(0)
    };
    let mut ddp = wrap(&ParallelContext::single(), 2, config).unwrap();
    for (factor, expected) in [(1.0, None), (1e4, Some("blocks.0.bias"))] {
        let loss = ddp.forward(&device(), |model| {
            let x = Tensor::<2>::zeros([2, 4], &device());
            let first = model.blocks[0].forward(x.clone()).sum();
            first.mul_scalar(factor) + model.blocks[1].forward(x).sum()
        });
        ddp.backward_last(loss);
        let invalid_gradients = ddp.reduce(1).unwrap().invalid_gradients;
        let named = invalid_gradients.first().map(|culprit| &culprit.path[..]);
        assert_eq!(named, expected);
    }
}

#[test]
fn replicas_that_differ_are_named() {
    for number in [0, 1, 3] {
        let run = |groups: &ParallelContext| {
            let config = DataParallelConfig {
                hsdp: (number > 0).then_some(1),
                ..stage(number)
            };
            let mut ddp = wrap(groups, 2, config)?;
            ddp.check_replicas()?;
            // A mistake of the caller: the ranks make different changes.
            let rank = groups.rank();
            ddp.update(|mut model| {
                if rank == 2 {
                    let weight = model.blocks[1].weight.clone();
                    model.blocks[1].weight = weight.map(|weight| weight + 1e-6);
                }
                model
            });
            Ok(ddp.check_replicas()?)
        };
        let error = over(1, 4, run).unwrap_err().to_string();
        let expected = "the replicas of blocks.1.weight differ on ranks 0 and 2";
        assert!(error.contains(expected), "ZeRO-{number}: {error}");
    }
}

#[test]
fn gradients_of_another_model_are_refused() {
    let ddp = wrap(&ParallelContext::single(), 1, stage(0)).unwrap();
    let part = |len| Tensor::<1>::zeros([len], &Device::flex());
    let error = |parts| ddp.gradients_of(parts, 1).unwrap_err().to_string();
    insta::assert_snapshot!(
        error(vec![part(16), part(3)]),
        @"3 elements were given for blocks.0.bias, expected 4 on this rank"
    );
    assert!(error(vec![part(16)]).contains("the list of parameters"));
}

/// A rank may have no parameters, for example in an empty stage of a pipeline.
#[test]
fn a_rank_without_parameters_sums_nothing() {
    for overlap_grad_reduce in [false, true] {
        for zero_stage in ZeroStage::ALL {
            let config = DataParallelConfig {
                zero_stage,
                overlap_grad_reduce,
                ..DataParallelConfig::default()
            };
            let run = |groups: &ParallelContext| {
                let model = ParallelModule::replicated(DropoutConfig::new(0.0).init());
                let mut ddp = DistributedDataParallel::with(model, groups, &config)?;
                for _ in 0..2 {
                    let input = Tensor::<1>::ones([3], &device()).require_grad();
                    let loss = ddp.forward(&device(), |model| model.forward(input.clone()).sum());
                    let leaves = ddp.backward_last(loss);
                    assert_eq!(values(input.grad(&leaves).unwrap()), [1.0; 3]);
                    let gradients = ddp.reduce(3)?;
                    assert_eq!((gradients.tokens, gradients.sums().count()), (6, 0));
                }
                Ok(())
            };
            over(1, 2, run).unwrap();
        }
    }
}
