//! Tests of the ranks over which gradients are summed, and of refused inputs. Gradients are `2^rank`, so that
//! every set of ranks has a different sum.

use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

use super::*;
use crate::comm::{ParallelContext, World, WorldError};
use crate::mesh::{Axis, ParallelConfig};
use crate::nn::hook::ParameterHook;
use crate::nn::{ParallelModule, ParameterEntry, Placement, Section};
use crate::testing::warnings;

mod call_order;
mod embeddings;
mod gradient_checks;
mod nodes;
mod precision;
mod quantized;
mod running_state;
mod static_buffers;

type RankError = Box<dyn std::error::Error + Send + Sync>;

#[derive(Module, Debug)]
struct Pair {
    first: Param<Tensor<2>>,
    second: Param<Tensor<1>>,
}

fn pair(value: f32, device: &Device) -> Pair {
    Pair {
        first: Param::from_tensor(Tensor::ones([2, 4], device).mul_scalar(value)),
        second: Param::from_tensor(Tensor::ones([3], device).mul_scalar(value)),
    }
}

fn single(model: Pair) -> DistributedDataParallel<Pair> {
    DistributedDataParallel::new(
        ParallelModule::replicated(model),
        &ParallelContext::single(),
    )
    .unwrap()
}

fn device() -> Device {
    Device::flex().autodiff()
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().unwrap()
}

/// Runs `f` on the ranks of a mesh.
fn over<T: Send>(
    tensor: usize,
    data: usize,
    f: impl Fn(&ParallelContext) -> Result<T, RankError> + Sync,
) -> Result<Vec<T>, WorldError> {
    over_layout(
        &ParallelConfig::new().with_tensor(tensor).with_data(data),
        f,
    )
}

/// Runs `f` on each rank of a layout.
fn over_layout<T: Send>(
    layout: &ParallelConfig,
    f: impl Fn(&ParallelContext) -> Result<T, RankError> + Sync,
) -> Result<Vec<T>, WorldError> {
    let run = |rank| f(&ParallelContext::new(layout, &rank)?);
    let ranks = layout.tensor * layout.data_size();
    World::threads(ranks).unwrap().run(run)
}

/// Returns the gradients of a [`Pair`]. Each rank contributes `2^rank` and one token.
fn sums(tensor: usize, data: usize, change: fn(&mut [ParameterEntry])) -> Vec<[Vec<f32>; 2]> {
    let run = |groups: &ParallelContext| {
        let mut model = ParallelModule::replicated(pair(1.0, &Device::flex()));
        change(model.table.entries_mut());
        let mut ddp = DistributedDataParallel::new(model, groups)?;
        let own = (1u64 << groups.rank()) as f64;
        let loss = ddp.forward(&device(), |pair| {
            (pair.first.val().sum() + pair.second.val().sum()).mul_scalar(own)
        });
        ddp.backward(loss);
        let gradients = ddp.reduce(1)?;
        assert_eq!(gradients.tokens, data as u64);
        let whole = ddp.full_gradients(&gradients).into_iter();
        let sums = whole.map(|g| values(g.mul_scalar(data as f64)));
        Ok(sums.collect::<Vec<_>>().try_into().unwrap())
    };
    over(tensor, data, run).unwrap()
}

/// Returns the gradient of the second parameter.
fn of_second(ddp: &mut DistributedDataParallel<Pair>, tokens: u64) -> Vec<f32> {
    let gradients = ddp.reduce(tokens).unwrap();
    values(ddp.full_gradients(&gradients).remove(1))
}

#[test]
fn gradients_are_summed_over_the_data_axis_alone() {
    // Ranks 0 and 2 are the first on the tensor axis, ranks 1 and 3 the second.
    for (rank, [first, second]) in sums(2, 2, |_| ()).into_iter().enumerate() {
        let sum = [5.0, 10.0][rank % 2];
        assert_eq!((first, second), (vec![sum; 8], vec![sum; 3]), "rank {rank}");
    }
}

#[test]
fn partial_sums_are_summed_over_the_tensor_axis_too() {
    let found = sums(2, 2, |entries| {
        entries[1].sum_over = entries[1].sum_over.with(Axis::Tensor)
    });
    for (rank, [first, second]) in found.into_iter().enumerate() {
        let own = [5.0, 10.0][rank % 2];
        assert_eq!(
            (first, second),
            (vec![own; 8], vec![15.0; 3]),
            "rank {rank}"
        );
    }
}

#[test]
fn replicated_sections_are_summed_over_the_ranks_that_hold_them() {
    // Each of four ranks has two columns of its own, one column that is replicated on pairs of ranks, and one
    // column that is replicated on all ranks.
    let found = sums(4, 2, |entries| {
        let section = |size, parts| Section { size, parts };
        let sections = vec![section(8, 4), section(2, 2), section(1, 1)];
        entries[0].placements = (Axis::Tensor, Placement::Split { dim: 1, sections }).into();
        entries[0].shape = vec![2, 11];
    });
    let all = |places: &[usize]| {
        places
            .iter()
            .map(|place| 17.0 * (1 << place) as f32)
            .sum::<f32>()
    };
    for (rank, [first, second]) in found.into_iter().enumerate() {
        let place = rank % 4;
        let (own, neighbours) = (all(&[place]), [place / 2 * 2, place / 2 * 2 + 1]);
        let row = [own, own, all(&neighbours), all(&[0, 1, 2, 3])];
        assert_eq!(
            (first, second),
            ([row, row].concat(), vec![own; 3]),
            "rank {rank}"
        );
    }
}

#[test]
fn uses_and_micro_batches_add_up() {
    let mut ddp = single(pair(1.0, &Device::flex()));
    for factor in [1.0, 10.0] {
        let loss = ddp.forward(&device(), |pair| {
            let twice = pair.second.val().sum() + pair.second.val().mul_scalar(3.0).sum();
            (pair.first.val().sum() + twice).mul_scalar(factor)
        });
        ddp.backward(loss);
    }
    let gradients = ddp.reduce(1).unwrap();
    let gradients = ddp.full_gradients(&gradients);
    assert_eq!(values(gradients[0].clone()), [11.0; 8]);
    assert_eq!(values(gradients[1].clone()), [44.0; 3]);
}

#[test]
fn ranks_with_more_tokens_weigh_more() {
    let run = |groups: &ParallelContext| {
        let tokens = [1, 3][groups.rank()];
        let mut ddp = DistributedDataParallel::new(
            ParallelModule::replicated(pair(1.0, &Device::flex())),
            groups,
        )?;
        let mean = [8.0, 16.0][groups.rank()];
        let loss = ddp.forward(&device(), |pair| {
            (pair.first.val().sum() + pair.second.val().sum()).mul_scalar(mean * tokens as f64)
        });
        ddp.backward(loss);
        Ok(of_second(&mut ddp, tokens))
    };
    // (1 * 8 + 3 * 16) / 4, not (8 + 16) / 2.
    assert_eq!(over(1, 2, run).unwrap(), [[14.0; 3]; 2]);
}

#[test]
fn a_rank_without_a_micro_batch_contributes_zeros() {
    let run = |groups: &ParallelContext| {
        let mut ddp = DistributedDataParallel::new(
            ParallelModule::replicated(pair(1.0, &Device::flex())),
            groups,
        )?;
        if groups.rank() == 1 {
            return Ok(of_second(&mut ddp, 0));
        }
        let loss = ddp.forward(&device(), |pair| {
            (pair.first.val().sum() + pair.second.val().sum()).mul_scalar(6.0)
        });
        ddp.backward(loss);
        Ok(of_second(&mut ddp, 2))
    };
    assert_eq!(over(1, 2, run).unwrap(), [[3.0; 3]; 2]);
}

#[test]
fn no_tokens_at_all_give_no_gradient() {
    let mut ddp = single(pair(1.0, &Device::flex()));
    let gradients = ddp.reduce(0).unwrap();
    assert_eq!(gradients.tokens, 0);
    assert_eq!(values(ddp.full_gradients(&gradients).remove(0)), [0.0; 8]);
}

#[test]
fn weights_are_those_of_the_first_rank_that_holds_them() {
    let run = |groups: &ParallelContext| {
        let mut model = ParallelModule::replicated(pair(groups.rank() as f32, &Device::flex()));
        model.table.entries_mut()[0].placements = (Axis::Tensor, Placement::split(1, 8, 2)).into();
        model.table.entries_mut()[0].shape = vec![2, 8];
        let ddp = DistributedDataParallel::new(model, groups)?;
        let pair = ddp.to_module();
        Ok((values(pair.first.base())[0], values(pair.second.base())[0]))
    };
    let expected = [(0.0, 0.0), (1.0, 0.0), (0.0, 0.0), (1.0, 0.0)];
    assert_eq!(over(2, 2, run).unwrap(), expected);
}

#[test]
fn a_model_built_for_autodiff_becomes_plain() {
    let ddp = single(pair(1.0, &device()));
    let module = ddp.to_module();
    assert!(!module.first.base().is_autodiff());
    assert!(module.first.reparameterization::<ParameterHook>().is_none());
    assert!(!ddp.module().first.val().is_autodiff());
}

#[test]
fn a_parameter_that_is_not_used_has_a_zero_gradient_and_is_named() {
    let mut ddp = single(pair(1.0, &Device::flex()));
    let warnings = warnings(|| {
        for _ in 0..2 {
            let loss = ddp.forward(&device(), |pair| pair.first.val().sum());
            ddp.backward(loss);
            assert_eq!(of_second(&mut ddp, 1), [0.0; 3]);
        }
    });
    assert_eq!(warnings.len(), 1, "one warning: {warnings:?}");
    assert!(warnings[0].contains("no gradient received") && warnings[0].contains("second"));
}

#[test]
fn a_parameter_that_the_loss_does_not_depend_on_has_a_zero_gradient() {
    for number in 0..=3 {
        let config = gradient_checks::stage(number);
        let model = ParallelModule::replicated(pair(1.0, &Device::flex()));
        let mut ddp =
            DistributedDataParallel::with(model, &ParallelContext::single(), &config).unwrap();
        for micro_batch in 0..2 {
            let loss = ddp.forward(&device(), |pair| {
                let _unused = pair.second.val().mul_scalar(2.0);
                pair.first.val().sum()
            });
            match micro_batch {
                0 => ddp.backward(loss),
                _ => ddp.backward_last(loss),
            };
        }
        let gradients = ddp.reduce(1).unwrap();
        let whole = ddp.full_gradients(&gradients);
        assert_eq!(values(whole[0].clone()), [2.0; 8]);
        assert_eq!(values(whole[1].clone()), [0.0; 3]);
    }
}

#[test]
fn a_forward_without_its_backward_is_named_and_discarded() {
    let mut ddp = single(pair(1.0, &Device::flex()));
    let sum = |pair: &Pair| pair.first.val().sum() + pair.second.val().sum();
    let losses = [ddp.forward(&device(), sum), ddp.forward(&device(), sum)];
    let [first, second] = losses;
    ddp.backward(first);
    let error = ddp.reduce(1).unwrap_err();
    insta::assert_snapshot!(
        error,
        @"first was used 1 times in a forward whose backward did not run"
    );
    // These gradients are ignored, because the step has ended.
    ddp.backward(second);
    let loss = ddp.forward(&device(), sum);
    ddp.backward(loss);
    assert_eq!(of_second(&mut ddp, 1), [1.0; 3]);
}

#[test]
fn ranks_with_other_models_are_named() {
    #[derive(Module, Debug)]
    struct Layer {
        linear: Linear,
    }
    let run = |groups: &ParallelContext| {
        let linear = LinearConfig::new(2 + groups.rank() / 2, 2).init(&Device::flex());
        DistributedDataParallel::new(ParallelModule::replicated(Layer { linear }), groups)?;
        Ok(())
    };
    let error = over(1, 3, run).unwrap_err().to_string();
    // Any of these ranks may report first.
    let said = [(0, 2), (1, 2), (2, 0)].map(|(rank, other)| {
        format!(
            "rank {rank} and rank {other} have different parameters: the models were built differently"
        )
    });
    assert!(said.iter().any(|said| error.contains(said)), "{error}");
}

#[test]
fn burn_dropout_drops_in_training_alone() {
    #[derive(Module, Debug)]
    struct Dropping {
        linear: Linear,
        dropout: Dropout,
    }
    let device = device();
    let module = Dropping {
        linear: LinearConfig::new(4, 64).with_bias(false).init(&device),
        dropout: DropoutConfig::new(0.5).init(),
    };
    let zeros = |module: &Dropping, device: &Device| {
        let x = Tensor::<2>::ones([16, 4], device);
        let y = module.dropout.forward(module.linear.forward(x));
        values(y).into_iter().filter(|y| *y == 0.0).count()
    };
    let ddp = DistributedDataParallel::new(
        ParallelModule::replicated(module),
        &ParallelContext::single(),
    );
    let ddp = ddp.unwrap();
    let dropped = ddp.forward(&device, |module| zeros(module, &device));
    // The bounds are five standard errors from half of 1024.
    assert!((432..=592).contains(&dropped), "{dropped} of 1024");
    assert_eq!(zeros(ddp.module(), &Device::flex()), 0);
}

/// An estimate has the layout and memory of the wrapped model, without a world and without allocating.
#[test]
fn an_estimate_equals_what_is_built() {
    use crate::mesh::Mesh;
    use crate::nn::{Init, ModelBuilder, ParallelMlp, ParallelMlpConfig};
    fn mlp(scope: ModelBuilder, hidden: usize) -> ParallelModule<ParallelMlp> {
        let config = ParallelMlpConfig {
            hidden,
            width: 4 * hidden,
            activation: crate::nn::Activation::GeluTanh,
            bias: true,
            init: Init::Normal(0.1),
            output_init: Init::Normal(0.1),
        };
        let module = config.init(&scope).unwrap();
        scope.finish(module).unwrap()
    }
    let mesh = ParallelConfig::new().with_tensor(2).with_data(2);
    for zero_stage in ZeroStage::ALL {
        let config = DataParallelConfig {
            zero_stage,
            precision: Precision::Bf16,
            bucket_size: Some(100),
            ..DataParallelConfig::default()
        };
        let outline = |groups: &ParallelContext, hidden| {
            let scope = ModelBuilder::new(groups, &Device::flex()).outline();
            ShardingEstimate::of(&mlp(scope, hidden), groups, &config)
        };
        let built = over(2, 2, |groups| {
            let model = mlp(ModelBuilder::new(groups, &Device::flex()), 16);
            let ddp = DistributedDataParallel::with(model, groups, &config)?;
            Ok((ddp.memory_plan()?, ddp.layout().bucket_count()))
        });
        for (rank, (memory, buckets)) in built.unwrap().into_iter().enumerate() {
            let mesh = Mesh::new(&mesh, 4).unwrap();
            let groups = ParallelContext::offline(mesh, rank).unwrap();
            let found = outline(&groups, 16).unwrap();
            assert_eq!(
                (found.memory, found.layout.bucket_count()),
                (memory, buckets)
            );
            // The size is 2^41 elements on each rank, and nothing is allocated.
            let large = outline(&groups, 1 << 19).unwrap().memory;
            assert!(large.total() > 1 << 40, "{large}");
        }
    }
}
