//! Tests that gradients of an unmodified Burn module are passed to its hooks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use burn::backend::DispatchTensor;
use burn::module::{Module, Param};
use burn::tensor::{Gradients, Tensor};
use burn_megatron_kernels::{Function, apply};

use super::case::elements;
use super::{autodiff, leaf, values, wave};
use crate::nn::hook::{GradientSink, anchored_value, attach_hooks, with_anchor};

#[derive(Module, Debug)]
struct Stack {
    layers: Vec<burn::nn::Linear>,
}

const WIDTH: usize = 3;

fn stack(layers: usize) -> Stack {
    let layer = |i: usize| burn::nn::Linear {
        weight: Param::from_tensor(leaf(wave([WIDTH, WIDTH], i as f64))),
        bias: Some(Param::from_tensor(leaf(wave([WIDTH], 10.0 + i as f64)))),
    };
    Stack {
        layers: (0..layers).map(layer).collect(),
    }
}

/// The gradients that the hooks received, and the marks that the backward pass reached, in order.
#[derive(Default)]
struct RecordingSink {
    events: Mutex<Vec<Event>>,
    expected: Mutex<Vec<usize>>,
}

#[derive(Clone, Debug, PartialEq)]
enum Event {
    /// The backward pass has reached the input of block `i`.
    Mark(usize),
    Gradient(usize, Vec<f64>),
}

impl RecordingSink {
    fn indices(&self) -> Vec<Option<usize>> {
        let index = |event: &Event| match event {
            Event::Mark(_) => None,
            Event::Gradient(index, _) => Some(*index),
        };
        self.events.lock().unwrap().iter().map(index).collect()
    }

    /// Returns all received gradients of parameter `index`.
    fn of(&self, index: usize) -> Vec<Vec<f64>> {
        let events = self.events.lock().unwrap();
        let of = |event: &Event| match event {
            Event::Gradient(i, gradient) if *i == index => Some(gradient.clone()),
            _ => None,
        };
        events.iter().filter_map(of).collect()
    }
}

impl GradientSink for RecordingSink {
    fn expect(&self, index: usize) {
        self.expected.lock().unwrap().push(index);
    }

    fn accumulate(&self, index: usize, gradient: Tensor<1>) {
        assert!(!gradient.is_autodiff());
        // Weights come first in each layer.
        let elements = if index.is_multiple_of(2) {
            WIDTH * WIDTH
        } else {
            WIDTH
        };
        assert_eq!(gradient.dims(), [elements]);
        let gradient = values(gradient);
        self.events
            .lock()
            .unwrap()
            .push(Event::Gradient(index, gradient));
    }
}

/// The identity, which records when the backward pass reaches it.
struct Mark(Arc<RecordingSink>, usize);

impl std::fmt::Debug for Mark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "mark {}", self.1)
    }
}

impl Function for Mark {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        (inputs.remove(0), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        self.0.events.lock().unwrap().push(Event::Mark(self.1));
        vec![Some(gradient)]
    }
}

fn with_hooks(stack: Stack) -> (Stack, Arc<RecordingSink>) {
    let sink = Arc::new(RecordingSink::default());
    (attach_hooks(stack, sink.clone()), sink)
}

fn input() -> Tensor<2> {
    leaf(wave([4, WIDTH], 20.0))
}

fn backward(y: Tensor<2>) -> Gradients {
    (y.clone() * y).sum().backward()
}

/// Returns the gradients of ordinary autodiff, in module order.
fn expected(stack: &Stack, forward: impl Fn(&Stack, Tensor<2>) -> Tensor<2>) -> Vec<Vec<f64>> {
    elements(stack, Some(&backward(forward(stack, input()))))
}

fn in_order(stack: &Stack, x: Tensor<2>) -> Tensor<2> {
    stack
        .layers
        .iter()
        .fold(x, |x, layer| layer.forward(x).tanh())
}

#[test]
fn gradients_arrive_as_backward_passes_each_block() {
    let expected = expected(&stack(3), in_order);
    let (stack, sink) = with_hooks(stack(3));
    let x = input();
    let mut y = x.clone();
    for (i, layer) in stack.layers.iter().enumerate() {
        let marked: Tensor<2> = apply(vec![y.into_dispatch()], Mark(sink.clone(), i));
        y = with_anchor(&marked, || layer.forward(marked.clone()).tanh());
    }
    let gradients = backward(y);
    assert_eq!(*sink.expected.lock().unwrap(), [0, 1, 2, 3, 4, 5]);

    let indices = sink.indices();
    for (block, events) in indices.chunks(3).enumerate() {
        let layer = 2 - block;
        let mut found = [events[0], events[1]];
        found.sort();
        assert_eq!(found, [Some(2 * layer), Some(2 * layer + 1)], "{indices:?}");
        assert_eq!(events[2], None, "{indices:?}");
    }
    assert_eq!(indices.len(), 9);
    for (i, expected) in expected.into_iter().enumerate() {
        assert_eq!(sink.of(i), [expected], "parameter {i}");
    }
    assert!(
        x.grad(&gradients).is_some(),
        "the anchor's own gradient stays"
    );
    let kept = stack.layers[1].weight.base().grad(&gradients);
    assert!(
        kept.is_none(),
        "a gradient that has left is kept nowhere else"
    );
}

#[test]
fn one_anchor_serves_a_whole_module() {
    let expected = expected(&stack(3), in_order);
    let (stack, sink) = with_hooks(stack(3));
    let x = input();
    let y = with_anchor(&x, || in_order(&stack, x.clone()));
    backward(y);
    for (i, expected) in expected.into_iter().enumerate() {
        assert_eq!(sink.of(i), [expected], "parameter {i}");
    }
}

#[test]
fn without_an_anchor_there_is_no_hook() {
    let expected = expected(&stack(2), in_order);
    let (stack, sink) = with_hooks(stack(2));
    let gradients = backward(in_order(&stack, input()));
    let found = [
        values(stack.layers[0].weight.base().grad(&gradients).unwrap()),
        values(
            stack.layers[0]
                .bias
                .as_ref()
                .unwrap()
                .base()
                .grad(&gradients)
                .unwrap(),
        ),
        values(stack.layers[1].weight.base().grad(&gradients).unwrap()),
        values(
            stack.layers[1]
                .bias
                .as_ref()
                .unwrap()
                .base()
                .grad(&gradients)
                .unwrap(),
        ),
    ];
    assert_eq!(found.to_vec(), expected);
    assert!(sink.events.lock().unwrap().is_empty());
    assert!(sink.expected.lock().unwrap().is_empty());
}

#[test]
fn a_weight_that_is_used_twice_gives_two_gradients() {
    let twice = |stack: &Stack, x: Tensor<2>| in_order(stack, in_order(stack, x));
    let expected = expected(&stack(1), twice);
    let (stack, sink) = with_hooks(stack(1));
    let x = input();
    backward(with_anchor(&x, || twice(&stack, x.clone())));
    assert_eq!(*sink.expected.lock().unwrap(), [0, 1, 0, 1]);
    for (i, expected) in expected.iter().enumerate() {
        let parts = sink.of(i);
        assert_eq!(parts.len(), 2, "parameter {i}");
        let sum: Vec<f64> = parts[0].iter().zip(&parts[1]).map(|(a, b)| a + b).collect();
        super::assert_close("the sum of both uses", &sum, expected);
    }
}

/// Returns whether an anchor is set.
fn has_anchor(stack: &Stack, sink: &RecordingSink) -> bool {
    let before = sink.expected.lock().unwrap().len();
    let _ = stack.layers[0].weight.val();
    sink.expected.lock().unwrap().len() > before
}

#[test]
fn the_outer_anchor_comes_back() {
    let (stack, sink) = with_hooks(stack(1));
    assert!(!has_anchor(&stack, &sink));
    with_anchor(&input(), || {
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            with_anchor(&input(), || std::panic::resume_unwind(Box::new("a fault")))
        }));
        assert!(unwound.is_err());
        assert!(has_anchor(&stack, &sink), "the outer one");
    });
    assert!(!has_anchor(&stack, &sink), "none");
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        with_anchor(&input(), || std::panic::resume_unwind(Box::new("a fault")))
    }));
    assert!(unwound.is_err());
    assert!(!has_anchor(&stack, &sink), "none after a panic");
}

#[test]
fn an_untracked_input_leaves_the_outer_anchor() {
    let (stack, sink) = with_hooks(stack(1));
    let untracked = Tensor::<2>::from_inner(wave([4, WIDTH], 20.0));
    for x in [wave([4, WIDTH], 20.0), untracked.clone()] {
        let _ = anchored_value(&stack.layers[0].weight, &x);
        assert!(sink.expected.lock().unwrap().is_empty());
    }
    let outer = Tensor::<1>::zeros([1], &autodiff()).require_grad();
    with_anchor(&outer, || {
        let _ = anchored_value(&stack.layers[0].weight, &untracked);
    });
    assert_eq!(*sink.expected.lock().unwrap(), [0]);
}
