//! Running states of Burn's batch norm, on ranks that have clones of one module.

use burn::nn::{BatchNorm, BatchNormConfig};
use burn::tensor::{DType, TensorData};

use super::*;

const FEATURES: usize = 3;

#[derive(Module, Debug)]
struct Net {
    weight: Param<Tensor<1>>,
    dropout: Dropout,
    bn: BatchNorm,
}

impl Net {
    fn new() -> Self {
        let device = device();
        Self {
            weight: Param::from_tensor(Tensor::ones([1], &device)),
            dropout: DropoutConfig::new(0.0).init(),
            bn: BatchNormConfig::new(FEATURES).init(&device),
        }
    }

    /// Returns a loss of inputs with `D` dims. The inputs differ between steps and between ranks.
    fn loss<const D: usize>(&self, number: usize) -> Tensor<1> {
        let mut shape = [2; D];
        shape[1] = FEATURES;
        let elements = shape.iter().product::<usize>();
        let value = |i: usize| ((i * 7 + number * 31) % 11) as f32;
        let data = TensorData::new((0..elements).map(value).collect::<Vec<_>>(), shape);
        let y = self.bn.forward(Tensor::<D>::from_data(data, &device()));
        y.sum() * self.weight.val()
    }

    fn states(&self) -> [Vec<f32>; 2] {
        let valid = self.valid();
        [&valid.bn.running_mean, &valid.bn.running_var].map(|state| values(state.value()))
    }
}

const STEPS: usize = 3;

/// Returns the states of a rank without a wrapper after the steps.
fn alone<const D: usize>(rank: usize) -> [Vec<f32>; 2] {
    let net = Net::new();
    (0..STEPS).for_each(|step| drop(net.loss::<D>(10 * rank + step)));
    net.states()
}

fn mean(states: &[[Vec<f32>; 2]]) -> [Vec<f32>; 2] {
    let mean = |which: usize, feature: usize| {
        let of_ranks = states.iter().map(|state| state[which][feature]);
        of_ranks.sum::<f32>() / states.len() as f32
    };
    [0, 1].map(|which| (0..FEATURES).map(|feature| mean(which, feature)).collect())
}

fn assert_close(what: &str, found: &[Vec<f32>; 2], expected: &[Vec<f32>; 2]) {
    let mut pairs = found.iter().flatten().zip(expected.iter().flatten());
    assert!(
        pairs.all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs()),
        "{what}: {found:?}, {expected:?}"
    );
}

fn check<const D: usize>(stage: ZeroStage) {
    let (net, what) = (Net::new(), format!("{D} dims, ZeRO-{stage}"));
    let config = DataParallelConfig {
        zero_stage: stage,
        ..DataParallelConfig::default()
    };
    let run = |groups: &ParallelContext| {
        let model = ParallelModule::replicated(net.clone());
        let mut ddp = DistributedDataParallel::with(model, groups, &config)?;
        assert!(ddp.module().dropout.training.is_enabled());
        for step in 0..STEPS {
            let number = 10 * groups.rank() + step;
            let loss = ddp.forward(&device(), |net| net.loss::<D>(number));
            ddp.backward(loss);
            ddp.reduce(1)?;
        }
        // With weight 0 the states do not change.
        ddp.forward_and_backward(&device(), 0.0, true, |net| {
            net.loss::<D>(99).backward();
        });
        ddp.reduce(1)?;
        let first = ddp.to_module();
        let states = first.states();
        // Later forwards of the module do not change the wrapper.
        drop(first.train().loss::<D>(5));
        Ok((states, ddp.to_module().states()))
    };
    let expected = mean(&[alone::<D>(0), alone::<D>(1)]);
    for (first, second) in over(1, 2, run).unwrap() {
        assert_close(&what, &first, &expected);
        assert_eq!(first, second, "{what}");
    }
}

#[test]
fn ranks_average_their_running_states() {
    for stage in ZeroStage::ALL {
        check::<2>(stage);
    }
    check::<3>(ZeroStage::Replicated);
    check::<4>(ZeroStage::Replicated);
    check::<5>(ZeroStage::Replicated);
}

#[test]
fn an_update_changes_running_states() {
    struct Fill;
    impl ModuleMapper for Fill {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| value.ones_like().mul_scalar(4.0))
        }
    }
    let model = ParallelModule::replicated(Net::new());
    let mut ddp = DistributedDataParallel::new(model, &ParallelContext::single()).unwrap();
    let forward = |ddp: &DistributedDataParallel<Net>| {
        let loss = ddp.forward(&device(), |net| net.loss::<2>(1));
        ddp.backward(loss);
    };
    forward(&ddp);
    ddp.reduce(1).unwrap();
    ddp.update(|net| net.map(&mut Fill));
    assert_eq!(ddp.to_module().states(), [vec![4.0; 3], vec![4.0; 3]]);
    // The forward continues from the new values.
    forward(&ddp);
    assert!(
        ddp.to_module().states()[1]
            .iter()
            .all(|variance| *variance > 3.6)
    );
}

#[test]
fn a_failed_broadcast_names_the_parameter() {
    let run = |groups: &ParallelContext| {
        let mut model = pair(1.0, &Device::flex());
        if groups.rank() == 1 {
            model.second = model.second.map(|value| value.cast(DType::F64));
        }
        DistributedDataParallel::new(ParallelModule::replicated(model), groups)?;
        Ok(())
    };
    let error = over(1, 2, run).unwrap_err().to_string();
    assert!(
        error.contains("the initial value of second was not broadcast"),
        "{error}"
    );
}
