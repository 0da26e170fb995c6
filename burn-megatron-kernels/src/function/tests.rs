use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::Device;

use super::*;

/// `x w`, saving both.
#[derive(Debug)]
struct Product;

impl Function for Product {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let [x, w] = matrices(inputs.clone());
        (x.matmul(w).into_dispatch(), inputs)
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let [x, w] = matrices(saved);
        let gradient = Tensor::<2>::from_dispatch(gradient);
        assert!(!gradient.is_autodiff());
        vec![
            needed[0].then(|| gradient.clone().matmul(w.transpose()).into_dispatch()),
            needed[1].then(|| x.transpose().matmul(gradient).into_dispatch()),
        ]
    }
}

fn matrices(tensors: Vec<DispatchTensor>) -> [Tensor<2>; 2] {
    let mut tensors = tensors.into_iter().map(Tensor::<2>::from_dispatch);
    [tensors.next().unwrap(), tensors.next().unwrap()]
}

fn product(x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
    apply(
        vec![x.clone().into_dispatch(), w.clone().into_dispatch()],
        Product,
    )
}

const X: [[f32; 2]; 3] = [[1.0, 2.0], [3.0, 4.0], [-1.0, 0.5]];
const W: [[f32; 2]; 2] = [[0.5, -1.0], [2.0, 1.0]];

#[test]
fn gradients_equal_those_of_the_recorded_operations() {
    for device in [
        Device::flex().autodiff(),
        Device::flex().autodiff().gradient_checkpointing(),
    ] {
        let x = Tensor::<2>::from_floats(X, &device).require_grad();
        let w = Tensor::<2>::from_floats(W, &device).require_grad();
        let y = product(&x, &w);
        let ours = (y.clone() * y).sum().backward();
        let y = x.clone().matmul(w.clone());
        let theirs = (y.clone() * y).sum().backward();
        for tensor in [&x, &w] {
            let ours = tensor.grad(&ours).unwrap().into_data();
            ours.assert_eq(&tensor.grad(&theirs).unwrap().into_data(), true);
        }
    }
}

#[test]
fn an_untracked_input_is_a_constant() {
    let device = Device::flex().autodiff();
    let w = Tensor::<2>::from_floats(W, &device).require_grad();
    let plain = Tensor::<2>::from_floats(X, &Device::flex());
    let untracked = Tensor::<2>::from_floats(X, &device);
    for x in [plain, untracked] {
        let y = product(&x, &w);
        assert!(y.is_autodiff());
        let gradient = w.grad(&y.sum().backward()).unwrap().into_data();
        gradient.assert_eq(&[[3.0f32, 3.0], [6.5, 6.5]].into(), true);
    }
}

#[test]
fn plain_inputs_record_nothing() {
    let device = Device::flex();
    let y = product(
        &Tensor::from_floats(X, &device),
        &Tensor::from_floats(W, &device),
    );
    assert!(!y.is_autodiff());
    y.into_data()
        .assert_eq(&[[4.5f32, 1.0], [9.5, 1.0], [0.5, 1.5]].into(), true);
}

#[test]
#[should_panic(expected = "was given 5")]
fn too_many_inputs_are_named() {
    let x = Tensor::<2>::from_floats(X, &Device::flex().autodiff()).require_grad();
    let inputs = vec![x.into_dispatch(); MAX_INPUTS + 1];
    let _: Tensor<2> = apply(inputs, Product);
}

/// `factor x`. Of two that share `given`, the second takes the gradient that the first has given.
#[derive(Debug)]
struct Scale {
    factor: f64,
    given: Arc<AtomicUsize>,
    taken: Arc<AtomicUsize>,
}

impl Function for Scale {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let x = Tensor::<1>::from_dispatch(inputs.remove(0));
        ((x * self.factor).into_dispatch(), vec![])
    }

    fn backward(
        &self,
        _saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        self.given.fetch_add(1, Ordering::SeqCst);
        let gradient = Tensor::<1>::from_dispatch(gradient);
        vec![Some((gradient * self.factor).into_dispatch())]
    }

    fn onto(&self) -> Option<usize> {
        (self.given.load(Ordering::SeqCst) > 0).then_some(0)
    }

    fn backward_onto(
        &self,
        saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        needed: &[bool],
        so_far: DispatchTensor,
    ) -> Vec<Option<DispatchTensor>> {
        self.taken.fetch_add(1, Ordering::SeqCst);
        let own = self.backward(saved, gradient, needed).remove(0);
        let own = Tensor::<1>::from_dispatch(own.unwrap());
        vec![Some((own + Tensor::from_dispatch(so_far)).into_dispatch())]
    }
}

/// The gradient of `x` in `5 h + 3 h`, and how often one was added to another by a function.
fn scaled_twice(leaf: bool) -> (f32, usize) {
    let x = Tensor::<1>::from_floats([1.0], &Device::flex().autodiff()).require_grad();
    let h = if leaf { x.clone() } else { x.clone() * 2.0 };
    let (given, taken) = (Arc::<AtomicUsize>::default(), Arc::default());
    let scale = |factor| {
        let function = Scale {
            factor,
            given: given.clone(),
            taken: Arc::clone(&taken),
        };
        apply::<1>(vec![h.clone().into_dispatch()], function)
    };
    let gradients = (scale(5.0) + scale(3.0)).sum().backward();
    let gradient = x.grad(&gradients).unwrap().into_scalar::<f32>();
    (gradient, taken.load(Ordering::SeqCst))
}

#[test]
fn a_function_adds_to_the_gradient_so_far() {
    assert_eq!(scaled_twice(false), (16.0, 1));
}

#[test]
fn the_gradient_of_a_leaf_stays_where_it_is() {
    assert_eq!(scaled_twice(true), (8.0, 0));
}
