import { lateFigure, plotly } from "./figure.js";

export default () => lateFigure(plotly);
