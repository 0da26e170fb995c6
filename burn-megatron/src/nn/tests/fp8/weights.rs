//! Tests that weights are quantized once and cached until they change.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn::module::{Module, Param, Reparameterizer};
use burn::tensor::Tensor;
use burn_megatron_kernels::fp8;

use super::*;
use crate::nn::hook::{GradientSink, ParameterHook, ParameterValue, Pass, with_anchor};

const IN: usize = 16;
const OUT: usize = 32;

/// Supplies the weight and counts the fetches.
#[derive(Default)]
struct Counting {
    weight: Mutex<Option<Tensor<2>>>,
    /// The FP8 weight, if the sink holds it in FP8.
    quantized: Option<Arc<QuantizedWeight>>,
    fetches: AtomicUsize,
    gradients: Mutex<Vec<Vec<f32>>>,
}

impl GradientSink for Counting {
    fn value(&self, index: usize, _: Pass) -> Option<ParameterValue> {
        if index != 0 {
            return None;
        }
        self.fetches.fetch_add(1, Ordering::Relaxed);
        let weight = self.weight.lock().unwrap().clone()?;
        Some(ParameterValue {
            flat: weight.reshape([IN * OUT]),
            keep: None,
        })
    }

    fn quantized(&self, index: usize, _: Pass) -> Option<Arc<QuantizedWeight>> {
        self.quantized.clone().filter(|_| index == 0)
    }

    fn expect(&self, _: usize) {}

    fn accumulate(&self, index: usize, gradient: Tensor<1>) {
        if index == 0 {
            self.gradients.lock().unwrap().push(floats(gradient));
        }
    }
}

struct Attach(Arc<Counting>, usize);

impl Reparameterizer for Attach {
    type Reparam = ParameterHook;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ParameterHook>) {
        self.1 += 1;
        let param = param.map(|tensor| tensor.inner().mul_scalar(f64::NAN));
        (param, Some(ParameterHook::new(self.1 - 1, self.0.clone())))
    }
}

struct Setup {
    fp8: Fp8,
    layer: Fp8Linear,
    sink: Arc<Counting>,
}

fn setup(fp8: &Fp8Config, quantized: Option<Arc<QuantizedWeight>>) -> Setup {
    let fp8 = Fp8::new(fp8).unwrap();
    let config = Fp8LinearConfig::new(IN, OUT).with_bias(false);
    let layer = config.init("layer", &fp8, &autodiff()).unwrap();
    let sink = Arc::new(Counting {
        weight: Mutex::new(Some(spread([IN, OUT], 1.0))),
        quantized,
        ..Counting::default()
    });
    let layer = layer.apply_reparameterization(Attach(sink.clone(), 0));
    Setup { fp8, layer, sink }
}

impl Setup {
    fn fetches(&self) -> usize {
        self.sink.fetches.swap(0, Ordering::Relaxed)
    }

    /// Returns the output and gradients of a micro-batch.
    fn train(&self) -> [Vec<f32>; 3] {
        let x = leaf(spread([1, 5, IN], 0.5));
        let y = self.layer.forward(x.clone());
        let gradients = backward(y.clone(), spread([1, 5, OUT], 3.0));
        let weight = self.sink.gradients.lock().unwrap().pop().unwrap();
        [
            floats(y.inner()),
            floats(x.grad(&gradients).unwrap()),
            weight,
        ]
    }
}

#[test]
fn without_a_manager_each_use_asks() {
    for recipe in recipes() {
        let setup = setup(&config(recipe), None);
        for _ in 0..4 {
            setup.train();
            assert_eq!(setup.fetches(), 2, "forward and backward: {recipe:?}");
        }
    }
}

#[test]
fn a_managed_weight_is_quantised_once() {
    for recipe in recipes() {
        let (kept, fresh) = (setup(&config(recipe), None), setup(&config(recipe), None));
        kept.fp8.cache_quantized_weights(true);
        let expected = fresh.train();
        for _ in 0..4 {
            assert_eq!(
                kept.train().map(|x| bits(&x)),
                expected.clone().map(|x| bits(&x))
            );
        }
        // An evaluation uses the cached weight too.
        let x: Tensor<3> = spread([1, 5, IN], 0.5);
        assert_eq!(bits(&floats(kept.layer.forward(x))), bits(&expected[0]));
        assert_eq!(kept.fetches(), 1, "{recipe:?}");

        let other = spread([IN, OUT], 8.0);
        for setup in [&kept, &fresh] {
            *setup.sink.weight.lock().unwrap() = Some(other.clone());
        }
        kept.fp8.invalidate_weights();
        assert_eq!(
            kept.train().map(|x| bits(&x)),
            fresh.train().map(|x| bits(&x))
        );
        assert_eq!(kept.fetches(), 1, "{recipe:?}");
        kept.fp8.cache_quantized_weights(false);
        kept.train();
        assert_eq!(kept.fetches(), 2, "{recipe:?}");
    }
}

#[test]
fn new_scales_are_a_change() {
    let setup = setup(
        &config(("delayed".parse().unwrap(), Fp8Format::Hybrid)),
        None,
    );
    setup.fp8.cache_quantized_weights(true);
    let first = setup.train();
    setup.fp8.end_step_single_rank().unwrap();
    assert_ne!(setup.train().map(|x| bits(&x)), first.map(|x| bits(&x)));
    assert_eq!(setup.fetches(), 2);
}

#[test]
fn scales_of_a_checkpoint_are_a_change() {
    let delayed = config((
        Fp8Recipe::Delayed(DelayedScaling::default()),
        Fp8Format::Hybrid,
    ));
    let (kept, fresh) = (setup(&delayed, None), setup(&delayed, None));
    kept.fp8.cache_quantized_weights(true);
    kept.train();
    let states = [("layer".to_string(), state([3.0, 100.0, 7.0], 1024))];
    let states = states.into_iter().collect();
    for setup in [&kept, &fresh] {
        setup.fp8.load(&states).unwrap();
    }
    assert_eq!(
        kept.train().map(|x| bits(&x)),
        fresh.train().map(|x| bits(&x))
    );
}

/// The backward pass uses the scale that the forward pass saved, and not a scale of the current value.
#[test]
fn a_backward_has_the_scales_of_its_forward() {
    let run = |save_activations, before: f64| {
        let setup = setup(
            &Fp8Config {
                save_activations,
                ..config((
                    Fp8Recipe::Current(CurrentScaling::default()),
                    Fp8Format::Hybrid,
                ))
            },
            None,
        );
        let weight = |factor| Some(spread([IN, OUT], 1.0).mul_scalar(factor));
        *setup.sink.weight.lock().unwrap() = weight(before);
        let x = leaf(spread([1, 5, IN], 0.5));
        let y = setup.layer.forward(x.clone());
        *setup.sink.weight.lock().unwrap() = weight(3.0);
        let gradients = backward(y, spread([1, 5, OUT], 3.0));
        bits(&floats(x.grad(&gradients).unwrap()))
    };
    assert_eq!(run(true, 1.0), run(false, 1.0));
    assert_ne!(run(false, 1.0), run(false, 3.0));
}

/// A weight that an evaluation has quantized is counted once when a step uses it.
#[test]
fn an_evaluation_before_a_step_hides_nothing() {
    let delayed = config(("delayed".parse().unwrap(), Fp8Format::Hybrid));
    let states = [false, true].map(|evaluated| {
        let setup = setup(&delayed, None);
        setup.fp8.cache_quantized_weights(true);
        if evaluated {
            let _ = setup.layer.forward(spread::<3>([1, 5, IN], 9.0));
            setup.fp8.end_step_single_rank().unwrap();
            let fresh = self::setup(&delayed, None);
            assert_eq!(setup.fp8.states(), fresh.fp8.states(), "nothing was noted");
        }
        setup.train();
        setup.train();
        setup.fp8.end_step_single_rank().unwrap();
        setup.fp8.states()
    });
    assert_eq!(states[0], states[1]);
    assert_ne!(states[0]["layer"].weight.history[0], 0);
}

#[test]
fn a_weight_that_the_store_has_in_8_bits_is_used_as_it_is() {
    for recipe in recipes() {
        let fresh = setup(&config(recipe), None);
        let (_, quantizer) = fresh.fp8.weights().remove(0);
        let weight = Arc::new(quantizer.quantize(spread([IN, OUT], 1.0)));
        let setup = setup(&config(recipe), Some(weight));
        setup.fp8.cache_quantized_weights(true);
        assert_eq!(
            setup.train().map(|x| bits(&x)),
            fresh.train().map(|x| bits(&x))
        );
        let x: Tensor<3> = spread([1, 5, IN], 0.5);
        let _ = setup.layer.forward(x.clone());
        let x = leaf(x);
        let layer = setup.layer.clone();
        let y = with_anchor(&x, || recompute(x.clone(), move |x| layer.forward(x)));
        let _ = backward(y, spread([1, 5, OUT], 3.0));
        assert_eq!(setup.fetches(), 0, "{recipe:?}");
    }
}

/// A parameter store that gathers weights in FP8 computes the scale, and the magnitude is recorded in the history.
#[test]
fn a_store_can_find_the_codes_of_a_weight() {
    for recipe in recipes() {
        let setup = setup(&config(recipe), None);
        let (path, quantizer) = setup.fp8.weights().remove(0);
        assert_eq!(path, "layer.weight");
        assert_eq!(quantizer.format(), fp8::Format::E4M3);
        let weight: Tensor<2> = spread([IN, OUT], 1.0);
        let copies = quantizer.quantize(weight.clone());
        setup.fp8.end_step_single_rank().unwrap();
        let of_copies = setup.fp8.states();
        if quantizer.has_one_scale() {
            let again = self::setup(&config(recipe), None);
            let (_, quantizer) = again.fp8.weights().remove(0);
            let scale = quantizer.scale(fp8::amax(weight.clone()));
            let fp8::Scales::Tensor(back) = copies.rowwise.scales.clone() else {
                panic!("a weight with one scale has others")
            };
            assert_eq!(1.0 / floats(scale)[0], floats(back)[0]);
            again.fp8.end_step_single_rank().unwrap();
            assert_eq!(again.fp8.states(), of_copies);
        }
        assert_eq!(copies.rowwise.rows(), IN);
        assert_eq!(copies.columnwise.rows(), OUT);
    }
}
