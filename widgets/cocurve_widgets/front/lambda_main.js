import { renderLambda } from "./lambda.js";

export default { render: renderLambda };
