use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::Device;

use super::*;

/// Computes `x w` and saves both inputs.
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
#[should_panic(expected = "was given 8")]
fn too_many_inputs_are_named() {
    let x = Tensor::<2>::from_floats(X, &Device::flex().autodiff()).require_grad();
    let inputs = vec![x.into_dispatch(); MAX_INPUTS + 1];
    let _: Tensor<2> = apply(inputs, Product);
}

/// Computes `[x + w, x w]` and counts the outputs that have a gradient.
#[derive(Debug)]
struct SumAndProduct(Arc<AtomicUsize>);

impl MultiFunction for SumAndProduct {
    fn forward(&self, inputs: Vec<DispatchTensor>) -> (Vec<DispatchTensor>, Vec<DispatchTensor>) {
        let [x, w] = matrices(inputs.clone());
        let outputs = [x.clone() + w.clone(), x * w];
        (outputs.map(Tensor::into_dispatch).into(), inputs)
    }

    fn backward(
        &self,
        saved: Vec<DispatchTensor>,
        mut gradients: Vec<Option<DispatchTensor>>,
        needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let given = gradients.iter().flatten().count();
        self.0.fetch_add(given, Ordering::SeqCst);
        let [x, w] = matrices(saved);
        let mut next = || {
            let gradient = gradients.remove(0);
            gradient.map_or(x.zeros_like(), Tensor::from_dispatch)
        };
        let (of_sum, of_product): (Tensor<2>, Tensor<2>) = (next(), next());
        let gradient =
            |other: Tensor<2>| (of_sum.clone() + of_product.clone() * other).into_dispatch();
        vec![
            needed[0].then(|| gradient(w.clone())),
            needed[1].then(|| gradient(x.clone())),
        ]
    }
}

#[test]
fn two_outputs_have_one_backward() {
    type Loss = fn([Tensor<2>; 2]) -> Tensor<2>;
    let losses: [(Loss, usize); 4] = [
        (|[sum, product]| sum * 2.0 + product.clone() * product, 2),
        (|[sum, product]| product + sum.clone() * sum * 3.0, 2),
        (|[sum, _]| sum, 1),
        (|[_, product]| product, 1),
    ];
    for device in [
        Device::flex().autodiff(),
        Device::flex().autodiff().gradient_checkpointing(),
    ] {
        for (loss, given) in losses {
            // The inputs are leaves of the autodiff graph, or results of other operations.
            for factor in [None, Some(2.0)] {
                let leaf = |values| Tensor::<2>::from_floats(values, &device).require_grad();
                let (x, w) = (leaf([[1.0, 2.0]]), leaf([[0.5, -1.0]]));
                let input = |leaf: &Tensor<2>| match factor {
                    Some(factor) => leaf.clone() * factor,
                    None => leaf.clone(),
                };
                let inputs = || [input(&x), input(&w)];
                let count = Arc::<AtomicUsize>::default();
                let ours = apply_multi(
                    inputs().map(Tensor::into_dispatch).into(),
                    SumAndProduct(count.clone()),
                );
                let ours = loss(ours).sum().backward();
                assert_eq!(count.load(Ordering::SeqCst), given);
                let [a, b] = inputs();
                let theirs = loss([a.clone() + b.clone(), a * b]).sum().backward();
                for tensor in [&x, &w] {
                    let ours = tensor.grad(&ours).unwrap().into_data();
                    ours.assert_eq(&tensor.grad(&theirs).unwrap().into_data(), true);
                }
            }
        }
    }
}

#[test]
fn two_outputs_of_plain_inputs_record_nothing() {
    let x = Tensor::<2>::from_floats(X, &Device::flex());
    let inputs = vec![x.clone().into_dispatch(); 2];
    let [sum, product] = apply_multi::<2, 2>(inputs, SumAndProduct(Arc::default()));
    assert!(!sum.is_autodiff() && !product.is_autodiff());
    sum.into_data()
        .assert_eq(&(x.clone() + x).into_data(), true);
}

/// Records the calls of an observer.
#[derive(Default)]
struct Told(std::sync::Mutex<Vec<String>>);

impl CallObserver for Told {
    fn inputs(&self, forward: Option<u64>, tensors: &[&DispatchTensor]) -> u64 {
        let mut told = self.0.lock().unwrap();
        told.push(format!("{forward:?} reads {}", tensors.len()));
        told.len() as u64
    }

    fn outputs(&self, function: &str, inputs: u64, outputs: &mut [DispatchTensor]) -> u64 {
        let doubled = Tensor::<1>::from_dispatch(outputs[0].clone()) * 2.0;
        outputs[0] = doubled.into_dispatch();
        self.0.lock().unwrap().push(format!("{function} {inputs}"));
        7
    }

    fn gradients(
        &self,
        function: &str,
        forward: u64,
        inputs: u64,
        gradients: &mut [Option<DispatchTensor>],
    ) {
        let count = gradients.iter().flatten().count();
        let text = format!("{function} {forward} {inputs}: {count}");
        self.0.lock().unwrap().push(text);
    }
}

#[test]
fn an_observer_sees_calls_in_its_body_and_their_backward() {
    /// Computes `3 x`.
    #[derive(Debug)]
    struct Triple;

    impl Function for Triple {
        fn forward(
            &self,
            mut inputs: Vec<DispatchTensor>,
        ) -> (DispatchTensor, Vec<DispatchTensor>) {
            let x = Tensor::<1>::from_dispatch(inputs.remove(0));
            ((x * 3.0).into_dispatch(), vec![])
        }

        fn backward(
            &self,
            _: Vec<DispatchTensor>,
            gradient: DispatchTensor,
            _: &[bool],
        ) -> Vec<Option<DispatchTensor>> {
            vec![Some(
                (Tensor::<1>::from_dispatch(gradient) * 3.0).into_dispatch(),
            )]
        }
    }

    let told = std::sync::Arc::new(Told::default());
    let x = Tensor::<1>::from_floats([1.0, 2.0], &Device::flex().autodiff()).require_grad();
    let triple = || -> Tensor<1> { apply(vec![x.clone().into_dispatch()], Triple) };
    let y = observed(told.clone(), triple);
    assert_eq!(y.clone().sum().into_scalar::<f32>(), 18.0);
    let gradients = (y + triple()).sum().backward();
    assert_eq!(x.grad(&gradients).unwrap().sum().into_scalar::<f32>(), 12.0);
    let told = told.0.lock().unwrap();
    assert_eq!(
        *told,
        [
            "None reads 1",
            "Triple 1",
            "Some(7) reads 1",
            "Triple 7 3: 1"
        ]
    );
}
