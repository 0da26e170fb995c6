//! The loss curve as a picture.

use plotters::prelude::*;

use super::{LossCurve, PlotError};

const SIZE: (u32, u32) = (960, 540);
const FONT: &str = "sans-serif";
const TEXT: RGBColor = RGBColor(60, 60, 60);
const FAINT: RGBColor = RGBColor(225, 225, 225);
const RAW: RGBColor = RGBColor(158, 202, 225);
const SMOOTHED: RGBColor = RGBColor(8, 81, 156);
const HELD_OUT: RGBColor = RGBColor(217, 95, 14);

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Axes =
    Cartesian2d<plotters::coord::types::RangedCoordusize, plotters::coord::types::RangedCoordf64>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Axes>;

pub(super) fn draw(curve: &LossCurve) -> Result<String, PlotError> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        draw_on(&area, curve).map_err(|error| PlotError::Draw(error.to_string()))?;
        area.present()
            .map_err(|error| PlotError::Draw(error.to_string()))?;
    }
    Ok(text)
}

fn draw_on(area: &Area<'_>, curve: &LossCurve) -> Result<(), Box<dyn std::error::Error>> {
    area.fill(&WHITE)?;
    let (first, last) = curve.steps();
    let (low, high) = curve.losses();
    let mut chart = ChartBuilder::on(area)
        .caption(&curve.title, (FONT, 24).into_font().color(&TEXT))
        .margin(16)
        .margin_right(32) // for the last label of the horizontal axis
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(first..last, low..high)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(FAINT)
        .axis_style(TEXT)
        .x_labels(11)
        .y_labels(9)
        .label_style((FONT, 15).into_font().color(&TEXT))
        .axis_desc_style((FONT, 17).into_font().color(&TEXT))
        .x_desc(curve.step_label())
        .y_desc("loss (nats per token)")
        .draw()?;
    draw_training(&mut chart, curve)?;
    draw_held_out(&mut chart, curve)?;
    if curve.training.is_empty() && curve.held_out.is_empty() {
        return Ok(()); // a legend of nothing would be an empty box
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .margin(12)
        .legend_area_size(36)
        .background_style(WHITE.mix(0.85))
        .border_style(FAINT)
        .label_font((FONT, 16).into_font().color(&TEXT))
        .draw()?;
    Ok(())
}

fn draw_training(
    chart: &mut Chart<'_, '_>,
    curve: &LossCurve,
) -> Result<(), Box<dyn std::error::Error>> {
    match curve.training[..] {
        [] => {}
        // A line of one point would not show.
        [point] => {
            chart
                .draw_series([Circle::new(point, 4, SMOOTHED.filled())])?
                .label("training")
                .legend(|(x, y)| Circle::new((x + 14, y), 4, SMOOTHED.filled()));
        }
        _ if !curve.is_smoothed() => {
            let line = LineSeries::new(curve.outline(), SMOOTHED.stroke_width(2));
            chart
                .draw_series(line)?
                .label("training")
                .legend(|at| key(at, SMOOTHED, 2));
        }
        _ => {
            let line = LineSeries::new(curve.outline(), RAW.stroke_width(1));
            chart
                .draw_series(line)?
                .label("training")
                .legend(|at| key(at, RAW, 1));
            let line = LineSeries::new(curve.smoothed(), SMOOTHED.stroke_width(2));
            chart
                .draw_series(line)?
                .label("training, smoothed")
                .legend(|at| key(at, SMOOTHED, 2));
        }
    }
    Ok(())
}

fn draw_held_out(
    chart: &mut Chart<'_, '_>,
    curve: &LossCurve,
) -> Result<(), Box<dyn std::error::Error>> {
    let points = &curve.held_out;
    if points.is_empty() {
        return Ok(());
    }
    chart.draw_series(LineSeries::new(
        points.iter().copied(),
        HELD_OUT.stroke_width(2),
    ))?;
    let dot = |at| Circle::new(at, 4, HELD_OUT.filled());
    chart
        .draw_series(points.iter().copied().map(dot))?
        .label("held-out")
        .legend(|(x, y)| Circle::new((x + 14, y), 4, HELD_OUT.filled()));
    Ok(())
}

/// The piece of line that stands in the legend.
fn key((x, y): (i32, i32), color: RGBColor, width: u32) -> PathElement<(i32, i32)> {
    PathElement::new([(x, y), (x + 28, y)], color.stroke_width(width))
}
